#include <algorithm>

#include "core/error.h"
#include "models/segmentation/segmentation.h"
#include "models/segmentation/task.h"
#include "nn/exchange.h"
#include "ops/layout.h"
#include "ops/loss.h"
#include "ops/pointwise.h"
#include "parallel/rank_device.h"
#include "tests/probe/probe.h"
#include "tests/probe/probe_case.h"
#include "train/data_parallel.h"
#include "train/memory_plan.h"

namespace weft {
namespace {

struct ProbeModelDeck {
  std::int64_t channels = 8;
  double momentum = 0.001;
  double eps = 1e-5;
  std::int64_t ranks = 1;
};
void model_rows(Rows& r, ProbeModelDeck& d) {
  r.number("channels", d.channels, 1, 65536, "weft_probe sync_batch_norm: channels.");
  r.number("momentum", d.momentum, 0, 1, "weft_probe sync_batch_norm: of the running statistics.");
  r.number("eps", d.eps, 0, 1, "weft_probe sync_batch_norm: least variance.");
  r.number("ranks", d.ranks, 1, many, "weft_probe sync_batch_norm: ranks that the inputs are for.");
}

struct ProbeTrainDeck {
  std::int64_t ranks = 1;
  std::int64_t first_iteration = 0;
  std::int64_t max_iterations = 1;
};
void train_rows(Rows& r, ProbeTrainDeck& d) {
  r.number("ranks", d.ranks, 1, many, "weft_probe train_steps: ranks that the inputs are for.");
  r.number("first_iteration", d.first_iteration, 0, many,
           "weft_probe train_steps: steps done before.");
  r.number("max_iterations", d.max_iterations, 1, many,
           "weft_probe train_steps: steps of the whole schedule.");
}

// [B,C,H,W] -> [B,1,H,W,C] in that type, and back in f32.
Tensor channels_last(const Tensor& x, DType dtype) {
  const Shape& s = x.shape();
  Tensor y = Tensor::empty({s[0], 1, s[2], s[3], s[1]}, DType::f32);
  ops::to_channels_last(x.view({s[0], s[1], 1, s[2], s[3]}), y);
  if (dtype == DType::f32) return y;
  Tensor low = Tensor::empty(y.shape(), dtype);
  ops::convert(y, low);
  return low;
}
Tensor frames_channels_first(const Tensor& x) {
  const Shape& s = x.shape();
  Tensor y = Tensor::empty({s[0], s[4], s[1], s[2], s[3]}, x.dtype());
  ops::to_channels_first(x, y);
  return y.view({s[0], s[4], s[2], s[3]});
}

// Classes, -1 for unlabelled, as the loader gives them: one more, in bytes.
Tensor read_labels(const ProbeInputs& inputs, const std::string& name, std::size_t rank,
                   std::int64_t classes) {
  const Shape shape = inputs.shape(name, rank);
  std::vector<std::uint8_t> bytes;
  for (const std::int64_t v : inputs.i64(name)) {
    WEFT_CHECK(v >= -1 && v < classes, Exit::data, "labels are classes from 0, or -1",
               "input \"{}\" has a label {}, and model.num_classes = {}", name, v, classes);
    bytes.push_back(static_cast<std::uint8_t>(v + 1));
  }
  return Tensor::from_host(std::span<const std::uint8_t>(bytes), shape);
}

// An output is written at the end, and may be the tensor itself: for those that change until then.
Tensor copy_of(const Tensor& t, DType dtype) {
  Tensor copy = Tensor::persistent(t.shape(), dtype);
  ops::convert(t, copy);
  return copy;
}
Tensor copy_of(const Tensor& t) { return copy_of(t, t.dtype()); }

DType dtype_of(const Deck& deck) { return deck.model.dtype == "bf16" ? DType::bf16 : DType::f32; }

void add_buffers(const ParameterTable& table, ProbeOutputs& outputs) {
  for (const auto& p : table.all())
    if (!p->trainable) outputs.add("buffer." + p->name, p->value);
}

double first_of(const Tensor& t) { return static_cast<double>(t.to_host().span<float>()[0]); }

void add_number(ProbeOutputs& outputs, const std::string& name, std::vector<float> values) {
  outputs.add(name, Tensor::from_host(std::span<const float>(values),
                                      {static_cast<std::int64_t>(values.size())}));
}

void forward(const Deck& deck, const ProbeRequest& request) {
  Segmentation model(deck.get<SegmentationDeck>());
  model.params().allocate_for_inference(deck.model.dtype == "bf16");
  load_segmentation(request.weights, deck.get<SegmentationDeck>(), model.params());
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const Shape s = inputs.shape("image", 4);
  Tape tape(Tape::Mode::infer);
  nn::BatchNormGroup norm;
  norm.use_running = true;
  const Var image = make_var(channels_last(inputs.f32("image", s), dtype_of(deck)), false);
  const Tensor logits = model.forward({tape, model.params()}, image, norm, {}, false).main->value;
  const std::int64_t classes = deck.get<SegmentationDeck>().num_classes;
  Tensor probabilities = Tensor::empty({s[0], classes, s[2], s[3]}, DType::f32);
  for (std::int64_t b = 0; b < s[0]; ++b) {
    const Tensor one[] = {logits.slice(b, b + 1)};
    Tensor prediction = Tensor::empty({s[2], s[3]}, DType::u8);
    Tensor counts = Tensor::empty({3, classes}, DType::i64);  // of nothing: there are no labels
    Tensor scores = probabilities.slice(b, b + 1).view({classes, s[2], s[3]});
    ops::predict_classes(prediction, one, Tensor(), counts, scores);
  }
  outputs.add("probabilities", probabilities);
  outputs.write(request.outputs);
}

void loss(const Deck& deck, const ProbeRequest& request) {
  SegmentationTask task(deck);
  ParameterTable& params = task.params();
  params.allocate(1 << 22, task.bf16(), request.backward);
  load_segmentation(request.weights, deck.get<SegmentationDeck>(), params);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, 1));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  const Tensor image = channels_last(inputs.f32("image", inputs.shape("image", 4)), dtype_of(deck));
  const Tensor labels = read_labels(inputs, "label", 3, deck.get<SegmentationDeck>().num_classes);
  const std::int64_t N = image.dim(0);
  Tape tape;
  params.begin_step([](int) {});
  const TrainingLoss l =
      task.loss(tape, image, labels, {}, 0, 1.0f / static_cast<float>(N), task.class_weights());
  outputs.add("loss", l.clips.slice(0, 1));
  add_number(outputs, "accuracy", {l.terms.to_host().span<float>()[0] / static_cast<float>(N)});
  if (request.backward) {
    tape.backward();
    params.finish_step();
    outputs.add_gradients(params);
  }
  add_buffers(params, outputs);
  outputs.write(request.outputs);
}

void check_ranks(std::int64_t wanted, int ranks) {
  WEFT_CHECK(wanted == ranks, Exit::usage, fmt::format("start it with mpirun -n {}", wanted),
             "the case is for {} ranks, and there are {}", wanted, ranks);
}

// A number of every rank as NAME_of_ranks, and their mean; on the first rank.
void add_of_ranks(ProbeOutputs& outputs, const std::string& step, const std::string& name,
                  float value, MPI_Comm world) {
  int ranks = 1;
  MPI_Comm_size(world, &ranks);
  std::vector<float> all(ranks);
  MPI_Gather(&value, 1, MPI_FLOAT, all.data(), 1, MPI_FLOAT, 0, world);
  double sum = 0;
  for (const float v : all) sum += static_cast<double>(v);
  add_number(outputs, step + "rank_" + name, all);
  add_number(outputs, step + name, {static_cast<float>(sum / ranks)});
}

// After the last step: each parameter, its momentum, and how far it is from `before`.
void add_updates(ProbeOutputs& outputs, const ParameterTable& params,
                 const std::vector<Tensor>& before, DataParallel& parallel) {
  for (std::size_t i = 0; i < before.size(); ++i) {
    const Parameter& p = *params.all()[i];
    if (!p.trainable) continue;
    outputs.add("grad.param." + p.name, p.value);
    const std::int64_t at = p.offset - params.buckets()[p.bucket].begin;
    outputs.add("grad.momentum." + p.name,
                parallel.state().exp_avg(p.bucket).slice(at, at + p.shape.numel()).view(p.shape));
    Tensor step = copy_of(before[i]), change = Tensor::empty(p.shape, DType::f32);
    ops::scaled_add(p.value, -1, Tensor(), step, true);
    ops::scaled_add(step, -1, Tensor(), change, false);  // minus (before - after)
    outputs.add("grad.update." + p.name, change);
  }
}

// Steps of training by the trainer's own parts (DataParallel, the task and its optimizers), on the
// batches that the inputs name: the trainer draws its own.
void train_steps(Deck deck, const ProbeRequest& request, MPI_Comm world) {
  const ProbeTrainDeck schedule = deck.get<ProbeTrainDeck>();
  const std::int64_t steps = deck.train.steps;
  deck.train.steps = schedule.max_iterations;
  deck.train.micro_batches = schedule.ranks;
  deck.parallel.zero = 0;  // the first rank writes all of the momentum
  const auto comm = make_communicator(world);
  const int rank = comm->rank(), ranks = comm->size();
  check_ranks(schedule.ranks, ranks);
  SegmentationTask task(deck);
  task.join_ranks(world, nullptr);
  ParameterTable& params = task.params();
  params.allocate(1 << 22, task.bf16(), true);
  load_segmentation(request.weights, deck.get<SegmentationDeck>(), params);
  const std::vector<TrainDeck> optimizers = task.optimizers();
  DataParallel parallel(deck.parallel, *comm, params, [](auto act) { act(); });
  parallel.make_state(false, deck.train.ema_decay);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, ranks));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  std::vector<Tensor> before;
  for (const auto& p : params.all()) before.push_back(copy_of(p->value, DType::f32));
  Tensor local = Tensor::persistent({1}, DType::f64);
  Tensor squares = Tensor::persistent({params.groups()}, DType::f64);

  for (std::int64_t s = 1; s <= steps; ++s) {
    const std::string step = fmt::format("step{}.", s), mine = fmt::format("{}rank{}.", step, rank);
    const Tensor image =
        channels_last(inputs.f32(mine + "image", inputs.shape(mine + "image", 4)), dtype_of(deck));
    const Tensor labels =
        read_labels(inputs, mine + "label", 3, deck.get<SegmentationDeck>().num_classes);
    const auto N = static_cast<float>(image.dim(0));
    const std::int64_t done = schedule.first_iteration + s - 1;
    // 1. Gradients of this rank's images, summed over the ranks.
    parallel.begin_step(local);
    TrainingLoss l;
    {
      const CountingScope counting(params, true);
      Tape tape;
      l = task.loss(tape, image, labels, {}, 0, 1.0f / (N * static_cast<float>(ranks)),
                    task.class_weights());
      tape.backward();
    }
    params.finish_step();
    parallel.join();
    if (s == 1)
      for (const auto& p : params.all())
        if (p->trainable) outputs.add("grad." + p->name, copy_of(p->grad));
    // 2. The update.
    parallel.norm(Tensor::persistent({1}, DType::f64), squares);
    parallel.update(optimizers, done, squares);
    parallel.settle();
    // 3. What is compared of the step.
    add_of_ranks(outputs, step, "loss", static_cast<float>(first_of(l.clips)), world);
    add_of_ranks(outputs, step, "accuracy", l.terms.to_host().span<float>()[0] / N, world);
    add_number(outputs, step + "lr",
               {static_cast<float>(learning_rate(optimizers[0], done)),
                static_cast<float>(learning_rate(optimizers[1], done))});
  }
  if (rank != 0) return;
  add_updates(outputs, params, before, parallel);
  add_buffers(params, outputs);
  outputs.write(request.outputs);
}

// A [N,C,H,W] tensor of every rank, on the first: sizes are those of input `like`.
void gather_tensor(const Tensor& mine, const ProbeInputs& inputs, int rank, int ranks,
                   const std::function<std::string(int)>& like,
                   const std::function<std::string(int)>& name, MPI_Comm world,
                   ProbeOutputs& outputs) {
  if (rank != 0) {
    const Tensor host = mine.to_host();
    MPI_Send(host.raw(), static_cast<int>(host.numel()), MPI_FLOAT, 0, 0, world);
    return;
  }
  outputs.add(name(0), mine);
  for (int r = 1; r < ranks; ++r) {
    const Shape s = inputs.shape(like(r), 4);
    std::vector<float> values(s.numel());
    MPI_Recv(values.data(), static_cast<int>(values.size()), MPI_FLOAT, r, 0, world,
             MPI_STATUS_IGNORE);
    outputs.add(name(r), Tensor::from_host(std::span<const float>(values), s));
  }
}

void sync_batch_norm(const Deck& deck, const ProbeRequest& request, MPI_Comm world) {
  const ProbeModelDeck& model = deck.get<ProbeModelDeck>();
  int rank = 0, ranks = 1;
  MPI_Comm_rank(world, &rank);
  MPI_Comm_size(world, &ranks);
  check_ranks(model.ranks, ranks);
  ParameterTable params;
  const nn::BatchNorm layer =
      add_batch_norm(params, "bn", model.channels, 0, static_cast<float>(model.momentum));
  params.allocate(1 << 22, false, true);
  params.initialise(0);
  const auto comm = nn::make_sequence_group(world, ranks);
  nn::BatchNormGroup group;
  group.ranks = comm.get();
  group.size = ranks;
  group.eps = static_cast<float>(model.eps);
  const auto arena = Arena::reserve(arena_capacity(deck.memory, ranks));
  const ArenaScope scope(*arena);
  const ProbeInputs inputs(request.inputs);
  ProbeOutputs outputs;
  for (const auto& p : params.all()) {
    const std::string name = p->name.substr(3);
    if (inputs.has(name)) ops::convert(inputs.f32(name, p->shape), p->value);
  }
  for (int s = 1; inputs.has(fmt::format("step{}.rank{}.x", s, rank)); ++s) {
    const std::string step = fmt::format("step{}.", s);
    const auto input = [&](const char* what) {
      return [step, what](int r) { return fmt::format("{}rank{}.{}", step, r, what); };
    };
    Tape tape;
    const nn::Context c{tape, params};
    params.begin_step([](int) {});
    const std::string x_name = input("x")(rank), dy_name = input("cotangent")(rank);
    const Var x = make_var(channels_last(inputs.f32(x_name, inputs.shape(x_name, 4)), DType::f32));
    const Var y = nn::batch_norm(c, x, layer, group, nn::Activation::none);
    const Tensor value = frames_channels_first(y->value);
    y->grad = channels_last(inputs.f32(dy_name, value.shape()), DType::f32);
    tape.backward();
    params.finish_step();
    gather_tensor(value, inputs, rank, ranks, input("x"), input("y"), world, outputs);
    gather_tensor(frames_channels_first(x->grad), inputs, rank, ranks, input("x"), input("grad.x"),
                  world, outputs);
    for (Parameter* p : {layer.weight, layer.bias}) {
      const Tensor mine = p->grad.to_host();
      std::vector<float> sum(mine.numel());
      MPI_Reduce(mine.raw(), sum.data(), static_cast<int>(sum.size()), MPI_FLOAT, MPI_SUM, 0,
                 world);
      add_number(outputs, step + "grad." + p->name.substr(3), sum);
    }
    for (const auto& p : params.all())
      if (!p->trainable) outputs.add(step + p->name.substr(3), copy_of(p->value));
  }
  if (rank == 0) outputs.write(request.outputs);
}

}  // namespace

std::vector<DeckTable> segmentation_probe_tables() {
  std::vector<DeckTable> tables = {deck_table("model", model_rows),
                                   deck_table("train", train_rows)};
  tables[0].next = "model";
  tables[1].next = "parallel";
  return tables;
}

int probe_segmentation(const Deck& deck, const ProbeRequest& request, MPI_Comm world) {
  const bool together = request.what == "train_steps" || request.what == "sync_batch_norm";
  int rank = 0;
  MPI_Comm_rank(world, &rank);
  if (!together && rank != 0) return 0;
  const RankDevice device = choose_device(deck.device.kind, true, together ? world : MPI_COMM_SELF);
  set_threads(static_cast<int>(deck.run.threads), device.core_sharers);
  if (request.what == "forward")
    forward(deck, request);
  else if (request.what == "loss")
    loss(deck, request);
  else if (request.what == "train_steps")
    train_steps(deck, request, world);
  else
    sync_batch_norm(deck, request, world);
  return 0;
}

}  // namespace weft
