#include "models/t5/text_encoder.h"

#include <malloc.h>
#include <mpi.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <exception>
#include <filesystem>
#include <functional>
#include <limits>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "checkpoint/model_source.h"
#include "checkpoint/safetensors.h"
#include "checkpoint/weights.h"
#include "core/clock.h"
#include "core/error.h"
#include "core/file.h"
#include "core/hash.h"
#include "core/log.h"
#include "core/mpi.h"
#include "data/clip_store.h"
#include "models/t5/options.h"
#include "models/t5/placement.h"
#include "models/t5/t5.h"
#include "tensor/tensor.h"
#include "text/tokenizer.h"
#include "text/utf8.h"

namespace weft {
namespace {

// ---- Messages between two ranks of the chain: host memory on both sides

// Short beside a layer's work, long beside the cost of polling MPI: the core is needed for
// computing.
constexpr double nap_seconds = 200e-6;

// Lets MPI progress messages while this rank is computing. Needs MPI_THREAD_MULTIPLE; does nothing
// without it.
class MessageProgress {
 public:
  explicit MessageProgress(MPI_Comm comm) {
    int provided = 0;
    MPI_Query_thread(&provided);
    if (provided != MPI_THREAD_MULTIPLE) return;
    thread_ = std::thread([this, comm] {
      constexpr int nobody = 99;  // no message has this tag: probing only lets MPI make progress
      const auto probe = [&] {
        int flag = 0;
        MPI_Iprobe(MPI_ANY_SOURCE, nobody, comm, &flag, MPI_STATUS_IGNORE);
        return stop_.load();
      };
      wait_asleep(probe, nap_seconds);
    });
  }
  ~MessageProgress() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  MessageProgress(const MessageProgress&) = delete;
  MessageProgress& operator=(const MessageProgress&) = delete;

 private:
  std::atomic<bool> stop_{false};
  std::thread thread_;
};

// One direction between two ranks: messages of whole rows, in order, at most two in flight. Either
// all of them arrive, or a message without rows ends the stream early. What waits calls `meanwhile`
// again and again, since the other side may wait for this rank's results in its turn.
class RowStream {
 public:
  using Meanwhile = std::function<void()>;

  // rows[i]: rows of message i, each of row_bytes. `peer` sends or receives them under `tag`.
  RowStream(MPI_Comm comm, int peer, int tag, std::vector<std::int64_t> rows, std::size_t row_bytes)
      : comm_(comm), peer_(peer), tag_(tag), rows_(std::move(rows)), row_bytes_(row_bytes) {
    // Counts rows: a count of bytes may not fit MPI's int.
    MPI_Type_contiguous(static_cast<int>(row_bytes), MPI_BYTE, &row_);
    MPI_Type_commit(&row_);
    const std::int64_t most = rows_.empty() ? 0 : *std::max_element(rows_.begin(), rows_.end());
    for (auto& b : buffers_) b.resize(static_cast<std::size_t>(most) * row_bytes);
  }
  ~RowStream() {
    // During stack unwinding messages may still be in flight, and nothing waits for them: leak
    // their buffers.
    if (std::uncaught_exceptions() > 0) {
      for (auto& b : buffers_) new std::vector<std::byte>(std::move(b));
      return;
    }
    for (MPI_Request& r : requests_)
      if (r != MPI_REQUEST_NULL) MPI_Request_free(&r);
    MPI_Type_free(&row_);
  }
  RowStream(const RowStream&) = delete;
  RowStream& operator=(const RowStream&) = delete;

  // Sending: next_buffer() returns a buffer once its previous message has left; send() sends it.
  std::span<std::byte> next_buffer(const Meanwhile& meanwhile) {
    wait(begun_ % 2, meanwhile);
    return buffer(begun_);
  }
  void send() {
    MPI_Isend(buffer(begun_).data(), static_cast<int>(rows_[begun_]), row_, peer_, tag_, comm_,
              &requests_[begun_ % 2]);
    ++begun_;
  }
  // Ends the stream early.
  void send_end(const Meanwhile& meanwhile) {
    wait(begun_ % 2, meanwhile);
    MPI_Isend(nullptr, 0, row_, peer_, tag_, comm_, &requests_[begun_ % 2]);
  }
  // Waits until everything sent has left.
  void drain(const Meanwhile& meanwhile) {
    for (std::size_t slot : {0, 1}) wait(slot, meanwhile);
  }

  // Receiving: begin() posts the receive of the next message; has_come() tells whether the oldest
  // has arrived; take() waits for it and is empty at the end. A buffer is valid until two more
  // receives have begun.
  void begin() {
    if (begun_ == rows_.size() || ended_) return;
    WEFT_ASSERT(begun_ < taken_ + 2);
    MPI_Irecv(buffer(begun_).data(), static_cast<int>(rows_[begun_]), row_, peer_, tag_, comm_,
              &requests_[begun_ % 2]);
    ++begun_;
  }
  bool has_come() { return taken_ != begun_ && test(taken_ % 2); }
  std::span<const std::byte> take(const Meanwhile& meanwhile) {
    const std::size_t slot = taken_ % 2;
    wait(slot, meanwhile);
    if (came_[slot] > 0) return buffer(taken_++);
    // The end of the stream: nothing will arrive in the other buffer, so cancel its receive.
    ended_ = true;
    MPI_Request& other = requests_[1 - slot];
    if (other == MPI_REQUEST_NULL) return {};
    MPI_Cancel(&other);
    MPI_Wait(&other, MPI_STATUS_IGNORE);
    return {};
  }
  bool done() const { return taken_ == rows_.size() || ended_; }

 private:
  bool test(std::size_t slot) {
    MPI_Request& request = requests_[slot];
    if (request == MPI_REQUEST_NULL) return true;
    int done = 0;
    MPI_Status status;
    MPI_Test(&request, &done, &status);
    if (done) MPI_Get_count(&status, row_, &came_[slot]);
    return done != 0;
  }
  void wait(std::size_t slot, const Meanwhile& meanwhile) {
    const auto left = [&] {
      if (test(slot)) return true;
      meanwhile();
      return false;
    };
    wait_asleep(left, nap_seconds);
  }
  std::span<std::byte> buffer(std::size_t i) {
    return std::span(buffers_[i % 2]).first(static_cast<std::size_t>(rows_.at(i)) * row_bytes_);
  }

  MPI_Comm comm_;
  int peer_, tag_;
  std::vector<std::int64_t> rows_;
  std::size_t row_bytes_;
  MPI_Datatype row_;
  std::array<std::vector<std::byte>, 2> buffers_;
  std::array<MPI_Request, 2> requests_{MPI_REQUEST_NULL, MPI_REQUEST_NULL};
  std::array<int, 2> came_{};          // rows
  std::size_t begun_ = 0, taken_ = 0;  // messages
  bool ended_ = false;
};

// ---- A rank's work while captions pass through the chain: receives activations, computes its
// layers, sends the result on; rank 0 writes the features as they arrive.

// The features file, F32 [tokens, channels] for each text, as micro-batches are done.
class FeatureFile {
 public:
  FeatureFile(const std::filesystem::path& file, std::vector<std::int64_t> tokens,
              std::int64_t channels, std::map<std::string, std::string> metadata)
      : channels_(channels), tokens_(std::move(tokens)) {
    std::vector<SafetensorWrite> list;
    for (std::size_t i = 0; i < tokens_.size(); ++i)
      list.push_back({std::to_string(i), DType::f32, {tokens_[i], channels}, {}});
    metadata["producer"] = "weft";
    writer_.emplace(file, list, metadata);
  }

  // Rows of a micro-batch, text behind text: bf16 where `low`, else f32.
  void write(const TextBatch& batch, std::span<const std::byte> rows, bool low) {
    const std::byte* from = rows.data();
    for (const std::size_t text : batch.texts) {
      const auto n = static_cast<std::size_t>(tokens_[text] * channels_);
      if (low) {
        std::vector<float> wide(n);
        const auto* values = reinterpret_cast<const bf16*>(from);
        std::transform(values, values + n, wide.begin(), [](bf16 v) { return float(v); });
        put(text, wide);
      } else {
        put(text, {reinterpret_cast<const float*>(from), n});
      }
      from += n * (low ? sizeof(bf16) : sizeof(float));
    }
  }
  void finish() { writer_->finish(); }

 private:
  void put(std::size_t text, std::span<const float> values) {
    for (const float v : values)
      WEFT_CHECK(std::isfinite(v), Exit::non_finite,
                 "the text encoder's weights (t5.weights) are damaged, or too large for t5.dtype",
                 "text {} does not encode to finite numbers: nothing is stored", text);
    writer_->write(text, std::as_bytes(values));
  }

  std::int64_t channels_;
  std::vector<std::int64_t> tokens_;
  std::optional<SafetensorsWriter> writer_;
};

class PipelineStage {
 public:
  // `part`: this rank's layers, or null; `file`: on rank 0. The current arena is that of the
  // activations. The first part calls `stop`, if given, between micro-batches: once it returns
  // true, the part begins no other and ends the stream, which tells the parts behind it.
  PipelineStage(const T5Deck& config, const T5Job& job, T5Encoder* part, FeatureFile* file,
                const std::function<bool()>& stop, MPI_Comm comm)
      : job_(job),
        part_(part),
        file_(file),
        stop_(stop),
        low_(config.dtype == "bf16"),
        width_(config.d_model) {
    constexpr int onward = 1, result = 2;
    const std::vector<T5Part>& parts = job.placement.parts;
    int rank = 0;
    MPI_Comm_rank(comm, &rank);
    const std::size_t row = static_cast<std::size_t>(width_) * (low_ ? 2 : 4);
    std::vector<std::int64_t> rows;
    for (const TextBatch& b : job.batches) rows.push_back(b.tokens);
    for (std::size_t i = 0; i < parts.size(); ++i) {
      if (parts[i].rank != rank) continue;
      if (i > 0) in_.emplace(comm, parts[i - 1].rank, onward, rows, row);
      if (i + 1 < parts.size())
        out_.emplace(comm, parts[i + 1].rank, onward, rows, row);
      else if (rank != 0)
        out_.emplace(comm, 0, result, rows, row);
    }
    if (rank == 0 && parts.back().rank != 0)
      results_.emplace(comm, parts.back().rank, result, rows, row);
  }

  // All micro-batches, or those before the stop: the file is not finished then. `ids` of all texts,
  // at the first part; `tokens` of each, everywhere. Whether all are done, as far as this rank
  // knows; the first part knows.
  bool run(const std::vector<std::vector<std::int32_t>>& ids,
           const std::vector<std::int64_t>& tokens) {
    // Receives into both result buffers from the start: results arrive while this rank computes.
    for (int ahead = 0; ahead < 2 && results_; ++ahead) results_->begin();
    if (in_) in_->begin();
    bool all = true;
    if (part_ != nullptr)
      for (const TextBatch& b : job_.batches)
        if (!(all = step(b, ids, tokens))) break;
    if (!all && out_) out_->send_end(take_results_);
    if (out_) out_->drain(take_results_);
    while (results_ && !results_->done()) take_result();
    // Rank 0 may hold no layers: it learns of a stop from a stream that ends early.
    if (results_) all = written_ == job_.batches.size();
    if (file_ != nullptr && all) file_->finish();
    return all;
  }

 private:
  // One micro-batch; false if there are no more.
  bool step(const TextBatch& batch, const std::vector<std::vector<std::int32_t>>& ids,
            const std::vector<std::int64_t>& tokens) {
    if (!in_ && stop_ && stop_()) return false;
    // 1. Its tokens; parts behind the first use only their number.
    PackedTokens packed;
    std::vector<std::int32_t> offsets{0}, all;
    for (const std::size_t text : batch.texts) {
      offsets.push_back(offsets.back() + static_cast<std::int32_t>(tokens[text]));
      if (!in_) all.insert(all.end(), ids[text].begin(), ids[text].end());
    }
    all.resize(batch.tokens);
    packed.ids = Tensor::from_host(std::span<const std::int32_t>(all), {batch.tokens});
    packed.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets),
                                       {static_cast<std::int64_t>(offsets.size())});
    packed.longest = batch.longest;
    // 2. Activations from the part before; the next ones arrive while these are computed.
    Tensor h;
    if (in_) {
      in_->begin();
      const std::span<const std::byte> rows = in_->take(take_results_);
      if (rows.empty()) return false;
      h = Tensor::empty({batch.tokens, width_}, low_ ? DType::bf16 : DType::f32);
      h.set(rows);
    }
    // 3. This part's layers, and their result to the next part or into the file.
    const Tensor y = part_->forward(packed, h);
    h.release();
    const Tensor host = y.to_host();
    const std::span<const std::byte> rows{static_cast<const std::byte*>(host.raw()), host.bytes()};
    if (out_) {
      std::copy(rows.begin(), rows.end(), out_->next_buffer(take_results_).begin());
      out_->send();
    } else {
      file_->write(batch, rows, low_);
    }
    take_results_();
    return true;
  }

  void take_result() {
    const std::span<const std::byte> rows = results_->take([] {});
    if (rows.empty()) return;
    file_->write(job_.batches[written_++], rows, low_);
    results_->begin();
  }

  const T5Job& job_;
  T5Encoder* part_;
  FeatureFile* file_;
  const std::function<bool()>& stop_;
  bool low_;
  std::int64_t width_;
  std::optional<RowStream> in_, out_, results_;
  std::size_t written_ = 0;  // micro-batches
  // Also called while this rank waits for others.
  const RowStream::Meanwhile take_results_ = [this] {
    while (results_ && !results_->done() && results_->has_come()) take_result();
  };
};

// ---- The encoder over all ranks

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
// part reads T5's bias table, which all parts need, and broadcasts it (umT5's belong to the
// layers). Returns the bytes read.
std::uint64_t load_part(const T5Deck& config, T5Encoder* part, const T5Job& job, MPI_Comm comm) {
  const int first = job.placement.parts.front().rank;
  const std::string shared = config.umt5 ? "" : t5_bias_name(0);
  std::uint64_t bytes = 0;
  if (part != nullptr) {
    part->params().allocate_for_inference(config.dtype == "bf16");
    WeightFiles files = WeightFiles::open(config.weights);
    T5Encoder whole(config, 0, config.num_layers);  // its names and shapes: it has no memory
    check_weights(files, whole.params(), t5_weight_names(config));
    read_weights(files, part->params(), t5_weight_names(config),
                 [&](const Parameter& p) { return p.name == shared && rank_in(comm) != first; });
    bytes = files.bytes_read();
    part->pack_weights();
  }
  if (shared.empty()) return bytes;
  Parameter* table = part == nullptr ? nullptr : part->params().find(shared);
  std::vector<float> bias(32 * config.num_heads);
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
  std::vector<unsigned long long> all(ranks);
  MPI_Allgather(&value, 1, MPI_UNSIGNED_LONG_LONG, all.data(), 1, MPI_UNSIGNED_LONG_LONG, comm);
  return {all.begin(), all.end()};
}

}  // namespace

EncodedTexts encode_tokens(const T5Deck& config, const std::vector<std::vector<std::int32_t>>& ids,
                           const std::vector<TextFile>& files, const std::function<bool()>& stop,
                           MPI_Comm world) {
  WEFT_CHECK(!config.weights.empty(), Exit::usage,
             "name the encoder's weights with t5.weights=PATH",
             "no text encoder: t5.weights is empty");
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

EncodedTexts encode_texts(const T5Deck& t5, const std::vector<std::string>& texts,
                          const std::vector<TextFile>& files, const std::function<bool()>& stop,
                          MPI_Comm world) {
  std::vector<std::vector<std::int32_t>> ids;
  if (rank_in(world) == 0) ids = t5_ids(t5, texts);
  return encode_tokens(t5, ids, files, stop, world);
}

namespace {

// Some of the texts, by their places: how many, and the first of them.
struct TextList {
  std::int64_t count = 0;
  std::string first;

  void add(std::size_t place, const std::string& what) {
    constexpr std::int64_t named = 3;
    if (++count <= named)
      first += fmt::format("{}{} ({})", first.empty() ? "" : ", ", place, printable(what, 60));
    else if (count == named + 1)
      first += ", ...";
  }
};

}  // namespace

std::vector<std::vector<std::int32_t>> t5_ids(const T5Deck& t5,
                                              const std::vector<std::string>& texts) {
  const Tokenizer tokenizer = t5_tokenizer(t5);
  std::vector<std::vector<std::int32_t>> all;
  TextList cut, emptied;
  for (const std::string& text : texts) {
    const std::size_t number = all.size();
    check_utf8(text, fmt::format("text {}", number));
    const std::string clean = t5_clean(t5, text);
    if (clean.empty() && !strip(text).empty()) emptied.add(number, text);
    auto& ids = all.emplace_back(tokenizer.encode(clean, std::numeric_limits<std::int32_t>::max()));
    if (std::ssize(ids) <= t5.max_length) continue;
    cut.add(number, fmt::format("{} tokens, {}", ids.size(), text));
    ids.resize(static_cast<std::size_t>(t5.max_length));
    ids.back() = Tokenizer::end_mark;
  }
  if (cut.count > 0)
    log::warn("{} of {} have more than {} tokens, and the encoder does not see the rest: {}",
              cut.count, counted(std::ssize(texts), "text"), t5.max_length, cut.first);
  if (emptied.count > 0)
    log::warn("cleaning leaves nothing of {} of {}, which are encoded as empty captions: {}",
              emptied.count, counted(std::ssize(texts), "text"), emptied.first);
  return all;
}

std::string T5TextEncoder::describe() const {
  if (!described_.empty()) return described_;
  described_ =
      fmt::format("{} {} {} {} {} {} length {} {} ", t5_.umt5 ? "umt5" : "t5", t5_.d_model,
                  t5_.d_kv, t5_.num_heads, t5_.d_ff, t5_.num_layers, t5_.max_length, t5_.dtype);
  if (!is_there(t5_.weights, Exit::data))  // check_weights() refuses
    return described_ += fmt::format("{} {} {}", t5_.clean, t5_.tokenizer, t5_.weights);
  const std::string tokenizer =
      read_whole(tokenizer_file(t5_.tokenizer, t5_.weights), std::uint64_t{1} << 30, Exit::data,
                 "set t5.tokenizer to the spiece.model that comes with the weights");
  return described_ += fmt::format(
             "{} {} clean {} weights {}", encoder_mark,
             to_hex(hash128(std::as_bytes(std::span(tokenizer)))), t5_.clean,
             fingerprint_of(WeightFiles::open(t5_.weights),
                            T5Encoder(t5_, 0, t5_.num_layers).params(), t5_weight_names(t5_)));
}

ModelSize T5TextEncoder::size() const {
  return size_of(T5Encoder(t5_, 0, t5_.num_layers).params());
}

void T5TextEncoder::check_weights() const { check_weights_exist("t5.weights", t5_.weights); }

}  // namespace weft
