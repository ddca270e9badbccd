#include "models/t5/text_encoder.h"

#include <malloc.h>

#include <algorithm>
#include <exception>
#include <optional>

#include "checkpoint/model_source.h"
#include "checkpoint/weights.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/log.h"
#include "models/t5/job.h"
#include "models/t5/options.h"
#include "models/t5/pipeline.h"
#include "models/t5/pipeline_stage.h"
#include "models/t5/t5.h"
#include "parallel/mpi.h"
#include "tensor/tensor.h"
#include "text/cleaning.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace weft {
namespace {

constexpr const char* bias_table =
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";

constexpr double progress_seconds = 10;

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

// A duplicate of the communicator, so that messages here never match other code's.
struct OwnComm {
  explicit OwnComm(MPI_Comm from) { MPI_Comm_dup(from, &comm); }
  ~OwnComm() {
    // Collective: during stack unwinding the other ranks may not take part.
    if (std::uncaught_exceptions() == 0) MPI_Comm_free(&comm);
  }
  MPI_Comm comm;
};

// Loads the weights of this rank's layers. Only one rank reads each byte of the files: the first
// part reads the bias table, which all parts need, and broadcasts it. Returns the bytes read.
std::uint64_t load_part(const T5Deck& config, T5Encoder* part, const T5Job& job, MPI_Comm comm) {
  const int first = job.placement.parts.front().rank;
  std::uint64_t bytes = 0;
  if (part != nullptr) {
    part->params().allocate_for_inference(config.dtype == "bf16");
    const WeightFiles files = WeightFiles::open(config.weights);
    T5Encoder whole(config, 0, config.num_layers);  // its names and shapes: it has no memory
    check_weights(files, whole.params(), t5_weight_names());
    read_weights(files, part->params(), t5_weight_names(), [&](const Parameter& p) {
      return p.name == bias_table && rank_in(comm) != first;
    });
    bytes = files.bytes_read();
    part->pack_weights();
  }
  Parameter* table = part == nullptr ? nullptr : part->params().find(bias_table);
  std::vector<float> bias(static_cast<std::size_t>(32 * config.num_heads));
  if (table != nullptr && rank_in(comm) == first) {
    const Tensor host = table->value.to_host();
    std::copy_n(host.data<float>(), bias.size(), bias.begin());
  }
  MPI_Bcast(bias.data(), static_cast<int>(bias.size()), MPI_FLOAT, first, comm);
  if (table != nullptr) table->set(0, bias);
  return bytes;
}

// Rank 0's captions, checked; their lengths on all ranks.
std::vector<std::int64_t> share_lengths(const T5Deck& config,
                                        const std::vector<std::vector<std::int32_t>>& ids,
                                        MPI_Comm comm) {
  std::vector<std::int64_t> tokens;
  if (rank_in(comm) == 0)
    for (std::size_t i = 0; i < ids.size(); ++i) {
      const auto n = static_cast<std::int64_t>(ids[i].size());
      WEFT_ASSERT(n >= 1 && n <= config.max_length);
      for (const std::int32_t id : ids[i])
        WEFT_CHECK(id >= 0 && id < config.vocab_size, Exit::data,
                   "tokenizer and t5.vocab_size must belong together",
                   "text {} has token {}, the encoder {}", i, id, config.vocab_size);
      tokens.push_back(n);
    }
  broadcast_sized(tokens, comm);
  return tokens;
}

// Sends the ids from rank 0 to the rank of the first part, if that is another.
std::vector<std::vector<std::int32_t>> ids_at(int first,
                                              std::span<const std::vector<std::int32_t>> ids,
                                              const std::vector<std::int64_t>& tokens,
                                              MPI_Comm comm) {
  constexpr int tag = 3;
  const int rank = rank_in(comm);
  std::vector<std::vector<std::int32_t>> here;
  if (rank == 0 && first == 0) here.assign(ids.begin(), ids.end());
  if (first == 0) return here;
  if (rank == 0)
    for (const auto& text : ids)
      MPI_Send(text.data(), static_cast<int>(text.size()), MPI_INT32_T, first, tag, comm);
  if (rank != first) return here;
  for (const std::int64_t n : tokens) {
    here.emplace_back(static_cast<std::size_t>(n));
    MPI_Recv(here.back().data(), static_cast<int>(n), MPI_INT32_T, 0, tag, comm, MPI_STATUS_IGNORE);
  }
  return here;
}

// Where rank 0's files end, on all ranks.
std::vector<std::size_t> share_ends(const std::vector<TextFile>& files, MPI_Comm comm) {
  std::vector<std::size_t> ends;
  if (rank_in(comm) == 0)
    for (const TextFile& file : files) ends.push_back(file.end);
  broadcast_sized(ends, comm);
  return ends;
}

std::vector<std::size_t> gather(std::size_t mine, MPI_Comm comm) {
  int ranks = 1;
  MPI_Comm_size(comm, &ranks);
  const unsigned long long value = mine;
  std::vector<unsigned long long> all(static_cast<std::size_t>(ranks));
  MPI_Allgather(&value, 1, MPI_UNSIGNED_LONG_LONG, all.data(), 1, MPI_UNSIGNED_LONG_LONG, comm);
  return {all.begin(), all.end()};
}

}  // namespace

EncodedTexts encode_tokens(const Deck& deck, const std::vector<std::vector<std::int32_t>>& ids,
                           const std::vector<TextFile>& files, const std::function<bool()>& stop,
                           MPI_Comm world) {
  const T5Deck& config = deck.get<T5Deck>();
  WEFT_CHECK(!config.weights.empty(), Exit::usage,
             "name the encoder's weights with t5.weights=PATH",
             "there is no text encoder: t5.weights is empty");
  const double start = now_seconds();
  const OwnComm own(world);
  const MPI_Comm comm = own.comm;
  const int rank = rank_in(comm);
  EncodedTexts done;
  done.tokens = share_lengths(config, ids, comm);
  const std::vector<std::size_t> ends = share_ends(files, comm);
  WEFT_ASSERT(!ends.empty() && ends.back() == done.tokens.size());
  if (done.tokens.empty()) {
    if (rank == 0)
      for (const TextFile& f : files) write_safetensors(f.path, {}, f.metadata);
    MPI_Barrier(comm);
    return done;
  }
  T5Job job = plan_t5(config, done.tokens, comm);
  done.limits = job.limits;
  std::vector<std::int64_t> tokens;  // of the texts of a file
  std::optional<FeatureFile> features;
  const auto begin_file = [&](std::size_t f) {
    const auto from = done.tokens.begin() + (f == 0 ? 0 : static_cast<std::ptrdiff_t>(ends[f - 1]));
    tokens.assign(from, done.tokens.begin() + static_cast<std::ptrdiff_t>(ends[f]));
    if (rank == 0) features.emplace(files[f].path, tokens, config.d_model, files[f].metadata);
  };
  begin_file(0);  // finds an unwritable folder before the weights are loaded
  std::size_t planned = 0, taken = 0, read = 0;
  {
    std::unique_ptr<T5Encoder> part;
    for (const T5Part& p : job.placement.parts)
      if (p.rank == rank) {
        part = std::make_unique<T5Encoder>(config, p.first, p.last);
        planned = p.weights + job.arena + job.messages;
      }
    read = load_part(config, part.get(), job, comm);
    const auto arena = Arena::reserve(part ? job.arena : 1);
    {
      const ArenaScope scope(*arena);
      const MessageProgress progress(comm);
      double reported = now_seconds();
      for (std::size_t f = 0; f < ends.size(); ++f) {
        if (f > 0) begin_file(f);
        const std::size_t first = f == 0 ? 0 : ends[f - 1];
        const auto here = ids_at(job.placement.parts.front().rank,
                                 rank == 0 ? std::span(ids).subspan(first, tokens.size())
                                           : std::span<const std::vector<std::int32_t>>(),
                                 tokens, comm);
        // No batch of one file's texts needs more than the first batch of all texts, for which the
        // memory is planned.
        job.batches = batch_captions(tokens, job.captions);
        PipelineStage stage(config, job, part.get(), features ? &*features : nullptr, stop, comm);
        int stopped = stage.run(here, tokens) ? 0 : 1;
        // Only the first part is sure to know of a stop.
        MPI_Bcast(&stopped, 1, MPI_INT, job.placement.parts.front().rank, comm);
        done.stopped = stopped != 0;
        if (done.stopped || f + 1 == ends.size()) break;
        if (now_seconds() - reported < progress_seconds) continue;
        reported = now_seconds();
        log::info("text      {} of {}", ends[f], counted(ends.back(), "text"));
      }
    }
    if (part)
      taken = part->params().inference_bytes(config.dtype == "bf16") + arena->peak() + job.messages;
  }
  // Otherwise the C library would keep freed small blocks for the rest of the run.
  malloc_trim(0);
  done.bytes_planned = gather(planned, comm);
  done.bytes_taken = gather(taken, comm);
  for (const std::size_t bytes : gather(read, comm)) done.weight_bytes_read += bytes;
  done.seconds = now_seconds() - start;
  return done;  // the gathers synchronised all ranks: rank 0's files exist
}

EncodedTexts encode_tokens(const Deck& deck, const std::vector<std::vector<std::int32_t>>& ids,
                           const std::filesystem::path& file, MPI_Comm world) {
  return encode_tokens(deck, ids, {{file, ids.size(), {}}}, {}, world);
}

EncodedTexts encode_texts(const Deck& deck, const std::vector<std::string>& texts,
                          const std::vector<TextFile>& files, const std::function<bool()>& stop,
                          MPI_Comm world) {
  std::vector<std::vector<std::int32_t>> ids;
  if (rank_in(world) == 0) {
    const Tokenizer tokenizer = t5_tokenizer(deck.get<T5Deck>());
    for (const std::string& text : texts) {
      check_utf8(text, fmt::format("text {}", ids.size()));
      ids.push_back(tokenizer.encode(deck.get<T5Deck>().clean ? clean_text(text) : text,
                                     deck.get<T5Deck>().max_length));
    }
  }
  return encode_tokens(deck, ids, files, stop, world);
}

EncodedTexts encode_texts(const Deck& deck, const std::vector<std::string>& texts,
                          const std::filesystem::path& file, MPI_Comm world) {
  return encode_texts(deck, texts, {{file, texts.size(), {}}}, {}, world);
}

std::string T5TextEncoder::describe() const {
  return fmt::format("t5 {} {} {} {} {} length {} {} clean {} tokenizer {} weights {}", t5_.d_model,
                     t5_.d_kv, t5_.num_heads, t5_.d_ff, t5_.num_layers, t5_.max_length, t5_.dtype,
                     t5_.clean, file_identity(t5_.tokenizer), folder_identity(t5_.weights));
}

ResultTables T5TextEncoder::result_tables() const {
  return {{"[t5]", {"weights", "tokenizer", "memory_gib", "micro_batch"}}};
}

std::string T5TextEncoder::weights_identity() const {
  return t5_.weights.empty() ? "" : folder_identity(t5_.weights);
}

std::string T5TextEncoder::tokenizer_identity() const {
  return t5_.tokenizer.empty() ? "" : file_identity(t5_.tokenizer);
}

void T5TextEncoder::check_weights() const { check_weights_exist("t5.weights", t5_.weights); }

}  // namespace weft
