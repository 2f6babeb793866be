// What training keeps between forward and backward, and what recomputing blocks of sublayers saves:
// the same gradients, bit for bit, from fewer bytes.
#include "mhc_stack.h"

#include <ehc/mhc/presets.h>

#include <cstdio>

namespace {

using example::Array;
using example::DType;
using example::Parameters;

example::Config config_of(const ehc::mhc::ModelPreset& model, int64_t sublayers) {
  const ehc::mhc::MixPreset& mix = model.mix;
  example::Config c{.tokens = 256,
                    .streams = model.streams,
                    .width = 128,  // of thousands in the model
                    .sublayers = sublayers,
                    .rules = {.norm_eps = mix.norm_eps,
                              .pre_eps = mix.pre_eps,
                              .post_mult = mix.post_mult,
                              .repeat = mix.repeat,
                              .sinkhorn_eps = mix.sinkhorn_eps,
                              .convention = mix.convention},
                    .layer_norm_eps = 1e-6,
                    .engram = {.rows = 1000, .row_width = 16, .row_count = 8}};
  if (model.is_single_pass) c.form = ehc::mhc::SeamForm::single_pass;
  // In front of the attention of layers 1 and 14, as far as there are any.
  for (const int64_t l : {2, 28}) {
    if (l < sublayers) c.engram.before.push_back(l);
  }
  return c;
}

struct Step {
  size_t kept = 0;  // between forward and backward
  size_t peak = 0;  // beyond parameters, their gradients and the batch
  Array grad_input;
  Parameters gradients;
};

// A forward and a backward. The loss is the sum of the last hidden states times `grad_hidden`.
Step train(example::Runtime& runtime, const example::Config& config, const example::Plan& plan,
           const Parameters& parameters, const std::vector<example::Layer>& layers,
           const example::Batch& batch, const Array& grad_hidden) {
  Step step;
  step.grad_input = runtime.zeros(config.type, {config.tokens, config.width});
  step.gradients = example::zero_gradients(runtime, config);
  const Array hidden = runtime.zeros(config.type, {config.tokens, config.width});
  example::Stack stack(runtime, config, plan, parameters, layers);
  const size_t before = runtime.meter.now;
  runtime.meter.peak = before;
  example::Tape tape = stack.forward(batch, hidden);
  step.kept = runtime.meter.now - before;
  stack.backward(batch, std::move(tape), grad_hidden, {step.gradients}, step.grad_input);
  step.peak = runtime.meter.peak - before;
  return step;
}

bool are_equal(const Step& a, const Step& b) {
  bool same = example::has_same_bits(a.grad_input, b.grad_input);
  const auto left = a.gradients.all();
  const auto right = b.gradients.all();
  for (size_t i = 0; i < left.size(); ++i) {
    same = same && example::has_same_bits(left[i].second, right[i].second);
  }
  return same;
}

void compare(const ehc::mhc::ModelPreset& model, int64_t sublayers) {
  example::Runtime runtime;
  const example::Config config = config_of(model, sublayers);
  std::mt19937 generator(0);
  const Parameters parameters = example::zero_parameters(runtime, config, DType::bf16);
  example::initialise(parameters, config, generator);
  const std::vector<example::Layer> layers = example::alternating_layers(config, generator);
  const example::Batch batch = example::random_batch(runtime, config, generator);
  const Array grad_hidden = runtime.zeros(config.type, {config.tokens, config.width});
  example::fill_normal(grad_hidden, generator, 0, 1);

  const example::Blocks blocks = example::best_blocks(runtime, config);
  const Step all = train(runtime, config, {}, parameters, layers, batch, grad_hidden);
  const Step some =
      train(runtime, config, {.blocks = blocks.starts}, parameters, layers, batch, grad_hidden);
  const auto kib = [](size_t bytes) { return static_cast<double>(bytes) / 1024; };
  std::printf("%-20s %9lld %6d %12.1f %12.1f %12.1f %12.1f  %s\n", model.name.data(),
              static_cast<long long>(sublayers), blocks.length, kib(all.kept), kib(some.kept),
              kib(all.peak), kib(some.peak), are_equal(all, some) ? "yes" : "no");
}

}  // namespace

int main() {
  std::printf("%-20s %9s %6s %25s %25s  %s\n", "", "", "", "kept, KiB", "peak, KiB", "gradients");
  std::printf("%-20s %9s %6s %12s %12s %12s %12s  %s\n", "model", "sublayers", "block", "all",
              "recomputed", "all", "recomputed", "equal");
  for (const char* name : {"deepseek-v4-flash", "deepseek-v4.1-flash"}) {
    for (const int64_t sublayers : {8, 16, 32}) compare(*ehc::mhc::find_model(name), sublayers);
  }
}
