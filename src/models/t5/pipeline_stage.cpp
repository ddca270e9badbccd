#include "models/t5/pipeline_stage.h"

#include <algorithm>

#include "core/error.h"
#include "models/t5/options.h"

namespace weft {

FeatureFile::FeatureFile(const std::filesystem::path& file, std::vector<std::int64_t> tokens,
                         std::int64_t channels, std::map<std::string, std::string> metadata)
    : channels_(channels), tokens_(std::move(tokens)) {
  std::vector<SafetensorWrite> list;
  for (std::size_t i = 0; i < tokens_.size(); ++i)
    list.push_back({std::to_string(i), DType::f32, {tokens_[i], channels}, {}});
  metadata["producer"] = "weft";
  writer_.emplace(file, list, metadata);
}

void FeatureFile::write(const TextBatch& batch, std::span<const std::byte> rows, bool low) {
  const std::byte* from = rows.data();
  for (const std::size_t text : batch.texts) {
    const auto n = static_cast<std::size_t>(tokens_[text] * channels_);
    if (low) {
      std::vector<float> wide(n);
      const auto* values = reinterpret_cast<const bf16*>(from);
      std::transform(values, values + n, wide.begin(), [](bf16 v) { return float(v); });
      writer_->write(text, std::as_bytes(std::span<const float>(wide)));
    } else {
      writer_->write(text, {from, n * sizeof(float)});
    }
    from += n * (low ? sizeof(bf16) : sizeof(float));
  }
}

PipelineStage::PipelineStage(const T5Deck& config, const T5Job& job, T5Encoder* part,
                             FeatureFile* file, const std::function<bool()>& stop, MPI_Comm comm)
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

bool PipelineStage::run(const std::vector<std::vector<std::int32_t>>& ids,
                        const std::vector<std::int64_t>& tokens) {
  // Receives into both result buffers from the start: results arrive while this rank computes.
  for (int ahead = 0; ahead < 2 && results_; ++ahead) results_->begin();
  if (in_) in_->begin();
  bool all = true;
  if (part_ != nullptr)
    for (const TextBatch& b : job_.batches)
      if (!(all = step(b, ids, tokens))) break;
  if (!all && out_) out_->send_end([this] { meanwhile(); });
  if (out_) out_->drain([this] { meanwhile(); });
  while (results_ && !results_->done()) take_result();
  // Rank 0 may hold no layers: it learns of a stop from a stream that ends early.
  if (results_) all = written_ == job_.batches.size();
  if (file_ != nullptr && all) file_->finish();
  return all;
}

// One micro-batch; false if there are no more.
bool PipelineStage::step(const TextBatch& batch, const std::vector<std::vector<std::int32_t>>& ids,
                         const std::vector<std::int64_t>& tokens) {
  const auto look = [this] { meanwhile(); };
  if (!in_ && stop_ && stop_()) return false;
  PackedTokens packed;
  std::vector<std::int32_t> offsets{0}, all;
  for (const std::size_t text : batch.texts) {
    offsets.push_back(offsets.back() + static_cast<std::int32_t>(tokens[text]));
    if (!in_) all.insert(all.end(), ids[text].begin(), ids[text].end());
  }
  all.resize(
      static_cast<std::size_t>(batch.tokens));  // parts behind the first use only their number
  packed.ids = Tensor::from_host(std::span<const std::int32_t>(all), {batch.tokens});
  packed.offsets = Tensor::from_host(std::span<const std::int32_t>(offsets),
                                     {static_cast<std::int64_t>(offsets.size())});
  packed.longest = batch.longest;
  Tensor h;
  if (in_) {
    in_->begin();  // receives the next one while this one is computed
    const std::span<const std::byte> rows = in_->take(look);
    if (rows.empty()) return false;
    h = Tensor::empty({batch.tokens, width_}, low_ ? DType::bf16 : DType::f32);
    h.set(rows);
  }
  const Tensor y = part_->forward(packed, h);
  h.release();
  const Tensor host = y.to_host();
  const std::span<const std::byte> rows{static_cast<const std::byte*>(host.raw()), host.bytes()};
  if (out_) {
    std::copy(rows.begin(), rows.end(), out_->next_buffer(look).begin());
    out_->send();
  } else {
    file_->write(batch, rows, low_);
  }
  take_results();
  return true;
}

// While this rank waits for others.
void PipelineStage::meanwhile() { take_results(); }

void PipelineStage::take_results() {
  while (results_ && !results_->done() && results_->has_come()) take_result();
}

void PipelineStage::take_result() {
  const std::span<const std::byte> rows = results_->take([] {});
  if (rows.empty()) return;
  file_->write(job_.batches[written_++], rows, low_);
  results_->begin();
}

}  // namespace weft
