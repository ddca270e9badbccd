// What prompts need from outside before a job can be planned: texts rewritten by a command, and
// references fetched from addresses. Rank 0 does this once and keeps the results with the clips, so
// that a resumed job has the same.
#pragma once

#include <mpi.h>

#include <filesystem>

#include "jobs/generate/options.h"
#include "jobs/generate/prompts/prompts.h"
#include "media/media_source.h"

namespace weft {

// For read_prompts: /bin/sh runs `command` on rank 0, with all texts, or texts of a number, that
// OUTPUT/refined_texts.json does not have yet, a line each, on its standard input; it prints as
// many lines. Exit::data names the command where it fails, prints another number of lines, an empty
// one or one that is not UTF-8; Exit::stopped where `stop` ended it. Collective, as the function
// that it returns. An empty `command` changes nothing.
RefineTexts refine_by(const std::string& command, const std::filesystem::path& output,
                      MPI_Comm world, const std::function<bool()>& stop);

// References at an address (media/media_source.h) become files in OUTPUT/references, which rank 0
// fetches unless they are there. Exit::data, beginning with the prompt's place; Exit::stopped where
// access.stop said so. Collective.
void fetch_references(std::vector<Prompt>& prompts, const GenerateDeck& deck,
                      const MediaAccess& access, const std::filesystem::path& output,
                      MPI_Comm world);

}  // namespace weft
