// Whole models of the operators: the stack of examples/mhc_stack.h against its formulas in double,
// and against itself where the ways to run it must agree.
#include "tests/ops/mhc/stack_oracle.h"
#include "tests/ops/mhc/sublayer.h"

namespace ehc::test {
namespace {

using example::Batch;
using example::Config;
using example::Parameters;
using example::Plan;
using mhc::Rounding;
using mhc::SeamForm;

Config config_of(SeamForm form, int64_t tokens, int64_t n, int64_t d, bool has_norms,
                 std::vector<int64_t> engrams, DType type = DType::f32) {
  return {.tokens = tokens,
          .streams = n,
          .width = d,
          .sublayers = 8,
          .type = type,
          .form = form,
          .rules = mhc::test::rules_of_tests(),
          .has_norm_weight = has_norms,
          .layer_norm_eps = has_norms ? 1e-4 : 0,
          .engram = {.before = std::move(engrams),
                     .rows = 6,
                     .row_width = 3,
                     .row_count = 2,
                     .taps = 3,
                     .dilation = 1}};
}

std::vector<Config> tiny_configs(DType type = DType::f32) {
  return {config_of(SeamForm::classic, 5, 4, 8, true, {3}, type),
          config_of(SeamForm::classic, 4, 3, 5, false, {2, 5}, type),
          config_of(SeamForm::single_pass, 5, 4, 8, true, {2, 5}, type),
          config_of(SeamForm::single_pass, 3, 2, 4, false, {3}, type)};
}

std::string text_of(const Config& c) {
  return std::string(c.form == SeamForm::classic ? "classic" : "single_pass") +
         " n=" + std::to_string(c.streams) + " " + std::string(name_of(c.type));
}

// A model, a batch and an upstream gradient.
struct Model {
  example::Runtime runtime;
  Config config;
  Parameters parameters;
  std::vector<std::vector<float>> matrices;  // of linear layers, empty for a tanh
  std::vector<example::Layer> layers;
  Batch batch;
  example::Array grad_hidden;

  explicit Model(const Config& c, const std::string& implementation = "", int threads = 1)
      : config(c) {
    runtime.context = context_for(implementation, threads);
    std::mt19937 generator(1);
    parameters = example::zero_parameters(runtime, config, config.type);
    example::initialise(parameters, config, generator);
    const float spread = 1 / std::sqrt(static_cast<float>(c.width));
    for (int64_t l = 0; l < c.sublayers; ++l) {
      std::vector<float>& matrix = matrices.emplace_back();
      if (l % 2 == 0) {
        for (int64_t i = 0; i < c.width * c.width; ++i) {
          matrix.push_back(std::normal_distribution<float>(0, spread)(generator));
        }
      }
      layers.push_back(matrix.empty() ? example::tanh_layer() : example::linear_layer(matrix));
    }
    batch = new_batch(2);
    grad_hidden = runtime.zeros(c.type, {c.tokens, c.width});
    example::fill_normal(grad_hidden, generator, 0, 1);
  }
  Batch new_batch(uint32_t seed) {
    std::mt19937 generator(seed);
    return example::random_batch(runtime, config, generator);
  }
};

struct Result {
  example::Array hidden, grad_input;
  Parameters gradients;

  // Of the last hidden states and of all gradients, by name.
  [[nodiscard]] std::vector<std::pair<std::string, Tensor>> all() const {
    auto list = gradients.all();
    list.emplace_back("input", grad_input);
    list.emplace_back("hidden", hidden);
    return list;
  }
};

Result train(Model& m, const Plan& plan) {
  Result r;
  r.hidden = m.runtime.zeros(m.config.type, {m.config.tokens, m.config.width});
  r.grad_input = m.runtime.zeros(m.config.type, {m.config.tokens, m.config.width});
  r.gradients = example::zero_gradients(m.runtime, m.config);
  example::Stack stack(m.runtime, m.config, plan, m.parameters, m.layers);
  example::Tape tape = stack.forward(m.batch, r.hidden);
  stack.backward(m.batch, std::move(tape), m.grad_hidden, {r.gradients}, r.grad_input);
  return r;
}

Doubles doubles_of(const Tensor& t) {
  Doubles values;
  for (int64_t i = 0; i < t.numel(); ++i) values.push_back(example::get(t, i));
  return values;
}

double length(const Doubles& x) { return std::sqrt(inner_product(x, x)); }

// Every parameter and the input, in random directions.
void expect_slopes_of_formulas(const Config& config, const Plan& plan, const std::string& impl) {
  Model m(config, impl);
  const Result r = train(m, plan);
  Values values;
  for (const auto& [name, tensor] : m.parameters.all()) values[name] = doubles_of(tensor);
  values["input"] = doubles_of(m.batch.hidden);
  const StackOracle oracle(m.config, m.matrices, m.batch);
  expect_near(doubles_of(r.hidden), oracle.hidden(values), 3e-6, "hidden");

  const Doubles upstream = doubles_of(m.grad_hidden);
  const auto loss = [&] { return inner_product(upstream, oracle.hidden(values)); };
  auto gradients = r.gradients.all();
  gradients.emplace_back("input", r.grad_input);
  ASSERT_EQ(gradients.size(), values.size());
  uint32_t seed = 0;
  for (const auto& [name, tensor] : gradients) {
    const Doubles gradient = doubles_of(tensor);
    ASSERT_GT(length(gradient), 1e-4) << name;
    Doubles& x = values.at(name);
    const Doubles start = x;
    for (int direction = 0; direction < 4; ++direction) {
      const Doubles step = random_doubles(static_cast<int64_t>(x.size()), ++seed);
      const auto loss_at = [&](double h) {
        for (size_t i = 0; i < x.size(); ++i) x[i] = start[i] + h * step[i];
        return loss();
      };
      constexpr double kStep = 1e-6;
      const double slope = (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
      x = start;
      EXPECT_NEAR(inner_product(gradient, step), slope, 2e-5 * length(gradient) * length(step))
          << name;
    }
  }
}

TEST(MhcStack, HasTheSlopesOfItsFormulas) {
  for (const Config& config : tiny_configs()) {
    for (const char* impl : {"", "reference"}) {
      SCOPED_TRACE(::testing::Message() << text_of(config) << " " << impl);
      expect_slopes_of_formulas(config, {}, impl);
      expect_slopes_of_formulas(config, {.saves_state = false, .broadcasts = true}, impl);
      expect_slopes_of_formulas(
          config, {.has_seams = false, .saves_state = false, .rounding = Rounding::chain}, impl);
    }
  }
}

void expect_same_bits(const Result& got, const Result& expected, const char* what) {
  const auto left = got.all();
  const auto right = expected.all();
  for (size_t i = 0; i < right.size(); ++i) {
    EXPECT_TRUE(example::has_same_bits(left[i].second, right[i].second))
        << what << ": " << right[i].first;
  }
}

TEST(MhcStack, SavedMadeAgainAndReplayedAreTheSameBits) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const Config& config : tiny_configs(type)) {
      SCOPED_TRACE(text_of(config));
      Model m(config);
      const std::vector<int32_t> best = example::best_blocks(m.runtime, config).starts;
      std::vector<int32_t> single;
      for (int32_t l = 0; l < config.sublayers; ++l) single.push_back(l);
      std::vector<int32_t> longest = {0};
      longest.insert(longest.end(), config.engram.before.begin(), config.engram.before.end());
      for (const Rounding rounding : {Rounding::once, Rounding::chain}) {
        for (const bool has_seams : {true, false}) {
          const Plan plan = {
              .has_seams = has_seams, .broadcasts = !has_seams, .rounding = rounding};
          const Result saved = train(m, plan);
          Plan other = plan;
          other.saves_state = false;
          expect_same_bits(train(m, other), saved, "state made again");
          for (const auto& blocks : {best, single, longest}) {
            other.blocks = blocks;
            expect_same_bits(train(m, other), saved, "replayed");
          }
        }
      }
    }
  }
}

TEST(MhcStack, ThreadsChangeNoBit) {
  for (Config config : tiny_configs(DType::bf16)) {
    config.tokens = 130;  // blocks of tokens for each thread
    SCOPED_TRACE(text_of(config));
    Model one(config);
    const Result expected = train(one, {});
    Model several(config, "", 3);
    expect_same_bits(train(several, {}), expected, "three threads");
  }
}

// With `once` a seam hands on fp32, where two calls round to the activation type.
TEST(MhcStack, SeamsAreTheirParts) {
  for (const DType type : {DType::f32, DType::bf16}) {
    for (const Config& config : tiny_configs(type)) {
      SCOPED_TRACE(text_of(config));
      Model m(config);
      expect_same_bits(train(m, {.rounding = Rounding::chain}),
                       train(m, {.has_seams = false, .rounding = Rounding::chain}), "chain");
      const Result seams = train(m, {});
      const Result parts = train(m, {.has_seams = false});
      const auto left = seams.all();
      const auto right = parts.all();
      for (size_t i = 0; i < right.size(); ++i) {
        expect_near(doubles_of(left[i].second), doubles_of(right[i].second),
                    type == DType::f32 ? 1e-5 : 5e-2, right[i].first);
      }
    }
  }
}

// main_grad: two micro-batches into the same tensors are the sum of both.
TEST(MhcStack, GradientsOfMicroBatchesAddUp) {
  for (const Config& config : tiny_configs()) {
    for (const bool has_seams : {true, false}) {
      SCOPED_TRACE(::testing::Message() << text_of(config) << " seams " << has_seams);
      Model m(config);
      example::Stack stack(m.runtime, config, {.has_seams = has_seams}, m.parameters, m.layers);
      const example::Array hidden = m.runtime.zeros(config.type, {config.tokens, config.width});
      const example::Array grad_input = m.runtime.zeros(config.type, {config.tokens, config.width});
      const auto gradients_of = [&](uint32_t seed, const example::Gradients& gradients) {
        const Batch batch = m.new_batch(seed);
        stack.backward(batch, stack.forward(batch, hidden), m.grad_hidden, gradients, grad_input);
      };
      const Parameters first = example::zero_gradients(m.runtime, config);
      const Parameters second = example::zero_gradients(m.runtime, config);
      const Parameters both = example::zero_gradients(m.runtime, config);
      gradients_of(5, {first});
      gradients_of(6, {second});
      gradients_of(5, {both});
      gradients_of(6, {both, true});
      const auto parts = first.all();
      const auto others = second.all();
      const auto sums = both.all();
      for (size_t i = 0; i < sums.size(); ++i) {
        const std::string& name = sums[i].first;
        Doubles expected = doubles_of(parts[i].second);
        const Doubles added = doubles_of(others[i].second);
        EXPECT_GT(length(added), 0) << name;
        for (size_t k = 0; k < expected.size(); ++k) expected[k] += added[k];
        expect_near(doubles_of(sums[i].second), expected, 1e-6, name);
      }
    }
  }
}

}  // namespace
}  // namespace ehc::test
