// `ehc plan`: how many layers to recompute at a time, and what that saves.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "ehc/dtype.h"
#include "ehc/error.h"
#include "ehc/mhc/plan_recompute.h"

namespace ehc::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  int64_t layers = 0;
  int64_t streams = 4;
  int64_t width = 0;
  std::vector<int64_t> stages;
  std::string dtype = "BF16";
  bool as_json = false;
};

struct PlanReport {
  int32_t block_length = 0;
  int64_t terms[2] = {};
  std::vector<int32_t> block_starts;
  // Bytes a token. The layers' outputs are kept in either case.
  double outputs = 0;
  double with = 0;
  double without = 0;
};

PlanReport plan_of(const Options& o) {
  if (!o.stages.empty()) {
    int64_t sum = 0;
    for (const int64_t layers : o.stages) sum += layers;
    if (sum != o.layers) {
      throw UsageError(
          fmt::format("--stages: expected a sum of --layers = {}, got {}", o.layers, sum));
    }
  }
  mhc::PlanRecompute params{
      .layers = o.layers,
      .n = o.streams,
      .d = o.width,
      .stages = o.stages.empty() ? std::span<const int64_t>() : std::span(o.stages)};
  PlanReport plan;
  plan.block_starts.resize(static_cast<size_t>(mhc::count_recompute_blocks(params)));
  params.block_length = Tensor(&plan.block_length, DType::i32, {1});
  params.terms = Tensor(plan.terms, DType::i64, {2});
  params.block_starts = Tensor(plan.block_starts.data(), DType::i32,
                               {static_cast<int64_t>(plan.block_starts.size())});
  Context context = Context::cpu(1);
  mhc::plan_recompute(context, params);
  const auto element = static_cast<double>(size_of(*dtype_from_name(o.dtype)));
  const auto elements_of_layers = static_cast<double>(o.layers) * static_cast<double>(o.width);
  plan.outputs = element * elements_of_layers;
  plan.with = plan.outputs +
              element * (static_cast<double>(plan.terms[0]) + static_cast<double>(plan.terms[1]));
  plan.without = plan.outputs + plan.outputs * static_cast<double>(o.streams + 2);
  return plan;
}

Json to_json(const Options& o, const PlanReport& plan) {
  return {{"layers", o.layers},
          {"streams", o.streams},
          {"width", o.width},
          {"dtype", o.dtype},
          {"block_length", plan.block_length},
          {"terms", {plan.terms[0], plan.terms[1]}},
          {"block_starts", plan.block_starts},
          {"bytes_per_token_with", static_cast<int64_t>(plan.with)},
          {"bytes_per_token_without", static_cast<int64_t>(plan.without)},
          {"bytes_per_token_of_outputs", static_cast<int64_t>(plan.outputs)}};
}

void print(const Options& o, const PlanReport& plan) {
  const double real_length =
      std::sqrt(static_cast<double>(o.streams * o.layers) / static_cast<double>(o.streams + 2));
  fmt::print("{} layers of {} streams, width {}, {}\n", o.layers, o.streams, o.width, o.dtype);
  fmt::print("block length        {} layers, {} blocks ({:.2f} without stages and in fractions)\n",
             plan.block_length, plan.block_starts.size(), real_length);
  fmt::print("kept of all blocks  {} elements a token\n", plan.terms[0]);
  fmt::print("kept of one block   {} elements a token, during its backward pass\n", plan.terms[1]);
  std::string starts;
  for (const int32_t start : plan.block_starts) starts += fmt::format(" {}", start);
  fmt::print("blocks begin at    {}\n", starts);
  fmt::print(
      "bytes a token       {:.0f} with recompute, {:.0f} without ({:.2f} times); {:.0f} of "
      "either are the layers' outputs\n",
      plan.with, plan.without, plan.without / plan.with, plan.outputs);
}

void run(const Options& o) {
  const PlanReport plan = plan_of(o);
  if (o.as_json) {
    fmt::print("{}\n", to_json(o, plan).dump(1));
  } else {
    print(o, plan);
  }
}

}  // namespace

void add_plan_command(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* plan = app.add_subcommand(
      "plan", "Show how many mHC layers to recompute at a time, and what it saves");
  constexpr int64_t kMostLayers = 1000000;
  constexpr int64_t kWidest = int64_t{1} << 31;
  plan->add_option("--layers", options->layers, "sublayers, of all stages")
      ->required()
      ->check(CLI::Range(int64_t{1}, kMostLayers));
  plan->add_option("--width", options->width, "d, values of a stream")
      ->required()
      ->check(CLI::Range(int64_t{1}, kWidest));
  plan->add_option("--streams", options->streams, "n")->check(CLI::Range(1, 8));
  plan->add_option("--stages", options->stages, "layers of each pipeline stage, e.g. 16,15,15,15")
      ->delimiter(',')
      ->check(CLI::Range(int64_t{1}, kMostLayers));
  plan->add_option("--dtype", options->dtype, "type of the activations: BF16, F16 or F32")
      ->check(CLI::IsMember({"BF16", "F16", "F32"}));
  plan->add_flag("--json", options->as_json, "as JSON");
  plan->callback([options] { run(*options); });
}

}  // namespace ehc::cli
