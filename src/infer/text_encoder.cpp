#include "infer/text_encoder.h"

#include <malloc.h>

#include <algorithm>
#include <optional>

#include "core/arena.h"
#include "core/clock.h"
#include "core/error.h"
#include "infer/t5_job.h"
#include "infer/t5_passage.h"
#include "infer/t5_pipeline.h"
#include "models/t5.h"
#include "models/weights.h"
#include "text/cleaning.h"
#include "text/tokenizer.h"

namespace weft {
namespace {

constexpr const char* bias_table =
    "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight";

int rank_in(MPI_Comm comm) {
  int rank = 0;
  MPI_Comm_rank(comm, &rank);
  return rank;
}

// The communicator's own copy, so that our messages meet nobody else's.
struct OwnComm {
  explicit OwnComm(MPI_Comm from) { MPI_Comm_dup(from, &comm); }
  ~OwnComm() { MPI_Comm_free(&comm); }
  MPI_Comm comm;
};

// This rank's layers with their weights, each byte from the files by one rank: the bias table, which all parts need, is read
// by the first. Returns the bytes read.
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
  auto count = static_cast<long long>(tokens.size());
  MPI_Bcast(&count, 1, MPI_LONG_LONG, 0, comm);
  tokens.resize(static_cast<std::size_t>(count));
  MPI_Bcast(tokens.data(), static_cast<int>(count), MPI_INT64_T, 0, comm);
  return tokens;
}

// The ids from rank 0 to the rank of the first part, if that is another.
std::vector<std::vector<std::int32_t>> ids_at(int first,
                                              const std::vector<std::vector<std::int32_t>>& ids,
                                              const std::vector<std::int64_t>& tokens,
                                              MPI_Comm comm) {
  constexpr int tag = 3;
  const int rank = rank_in(comm);
  std::vector<std::vector<std::int32_t>> here;
  if (rank == 0 && first == 0) here = ids;
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
                           const std::filesystem::path& file, MPI_Comm world) {
  const T5Deck& config = deck.t5;
  WEFT_CHECK(!config.weights.empty(), Exit::usage,
             "name the encoder's weights with t5.weights=PATH",
             "there is no text encoder: t5.weights is empty");
  const double start = now_seconds();
  const OwnComm own(world);
  const MPI_Comm comm = own.comm;
  const int rank = rank_in(comm);
  EncodedTexts done;
  done.tokens = share_lengths(config, ids, comm);
  if (done.tokens.empty()) {
    if (rank == 0) write_safetensors(file, {});
    MPI_Barrier(comm);
    return done;
  }
  const T5Job job = plan_t5(config, done.tokens, comm);
  done.limits = job.limits;
  std::optional<FeatureFile> features;
  if (rank == 0) features.emplace(file, done.tokens, config.d_model);
  const auto here = ids_at(job.placement.parts.front().rank, ids, done.tokens, comm);
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
      Passage passage(config, job, part.get(), features ? &*features : nullptr, comm);
      passage.run(here, done.tokens);
    }
    if (part)
      taken = part->params().inference_bytes(config.dtype == "bf16") + arena->peak() + job.messages;
  }
  // Small blocks that the C library keeps would stay ours for the rest of the run.
  malloc_trim(0);
  done.bytes_planned = gather(planned, comm);
  done.bytes_taken = gather(taken, comm);
  for (const std::size_t bytes : gather(read, comm)) done.weight_bytes_read += bytes;
  done.seconds = now_seconds() - start;
  return done;  // the gathering was a meeting: the file is there for all ranks
}

EncodedTexts encode_texts(const Deck& deck, const std::vector<std::string>& texts,
                          const std::filesystem::path& file, MPI_Comm world) {
  std::vector<std::vector<std::int32_t>> ids;
  if (rank_in(world) == 0) {
    const Tokenizer tokenizer = open_tokenizer(deck.t5);
    for (const std::string& text : texts)
      ids.push_back(tokenizer.encode(deck.t5.clean ? clean_text(text) : text, deck.t5.max_length));
  }
  return encode_tokens(deck, ids, file, world);
}

}  // namespace weft
