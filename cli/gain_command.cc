// `ehc gain`: what a deep stack of mixing maps does to a signal, with and without the constraint.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>

#include "cli/commands.h"
#include "cli/gain.h"
#include "cli/option_checks.h"
#include "core/bind.h"
#include "ehc/error.h"
#include "tables/safetensors.h"

namespace ehc::cli {

namespace {

using Json = nlohmann::ordered_json;
using mhc::SinkhornConvention;

struct Options {
  std::string in;
  int64_t layers = 60;
  int64_t tokens = 256;
  int64_t streams = 4;
  int64_t repeat = 20;
  double eps = 1e-6;
  double scale = 1;
  uint64_t seed = 1;
  SinkhornConvention convention = SinkhornConvention::deepseek;
  int threads = 0;
  bool as_json = false;
};

struct GainTable {
  std::string name;
  std::vector<GainRow> rows;
};

Json to_json(const std::vector<GainTable>& stacks) {
  Json out = Json::object();
  for (const GainTable& stack : stacks) out[stack.name] = gains_json(stack.rows);
  return out;
}

// Depths 1, 2, 4, ... and the whole stack.
std::vector<size_t> shown_depths(size_t layers) {
  std::vector<size_t> depths;
  for (size_t depth = 1; depth < layers; depth *= 2) depths.push_back(depth);
  if (layers > 0) depths.push_back(layers);
  return depths;
}

void print(const std::vector<GainTable>& stacks) {
  fmt::print(
      "worst over all tokens; gains of the product of all layers so far, defects and bound of "
      "the layer\n{:>5}",
      "");
  for (const GainTable& stack : stacks) fmt::print("  {:<54}", stack.name);
  fmt::print("\n{:>5}", "depth");
  for (size_t i = 0; i < stacks.size(); ++i) {
    fmt::print("  {:>10} {:>10} {:>10} {:>10} {:>10}", "forward", "backward", "row def.",
               "col. def.", "bound");
  }
  fmt::print("\n");
  for (const size_t depth : shown_depths(stacks.front().rows.size())) {
    fmt::print("{:>5}", depth);
    for (const GainTable& stack : stacks) {
      const GainRow& r = stack.rows[depth - 1];
      fmt::print("  {:>10.4g} {:>10.4g} {:>10.3e} {:>10.3e} {:>10.4g}", r.composite_forward,
                 r.composite_backward, r.row_defect, r.column_defect, r.spectral_bound);
    }
    fmt::print("\n");
  }
}

Tensor read_maps(const tables::SafetensorsFile& file, const std::string& path) {
  const Tensor comb = file.find("comb");
  if (comb.dtype != DType::f32 || comb.rank != 4 || comb.shape[0] < 1 || comb.shape[1] < 1) {
    throw Error(ErrorKind::contract, path +
                                         ": tensor 'comb': expected F32[L,T,n,n] with L and T "
                                         "above 0, got " +
                                         describe(comb));
  }
  return comb;
}

void run(const Options& o) {
  Context context = Context::cpu(o.threads);
  std::vector<GainTable> stacks;
  if (!o.in.empty()) {
    const auto file = tables::SafetensorsFile::open(o.in);
    stacks.push_back({o.in, gains_of(context, read_maps(file, o.in))});
  } else {
    const HostTensor logits =
        random_logits(context, o.layers, o.tokens, o.streams, o.scale, o.seed);
    const HostTensor maps = constrained_maps(context, logits.tensor, o.repeat, o.eps, o.convention);
    stacks.push_back({"constrained", gains_of(context, maps.tensor)});
    stacks.push_back({"unconstrained", gains_of(context, logits.tensor)});
  }
  if (o.as_json) {
    fmt::print("{}\n", to_json(stacks).dump(1));
  } else {
    print(stacks);
  }
}

}  // namespace

void add_gain_command(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* gain = app.add_subcommand(
      "gain", "Show how much a stack of mixing maps enlarges a signal, with and without Sinkhorn");
  CLI::Option* in =
      gain->add_option("--in", options->in, "safetensors file with maps comb F32[L,T,n,n]");
  const auto of_random_maps = [&](CLI::Option* option) { option->excludes(in); };
  of_random_maps(gain->add_option("--layers", options->layers, "maps of a stack")
                     ->check(CLI::Range(1, 10000)));
  of_random_maps(
      gain->add_option("--tokens", options->tokens, "stacks")->check(CLI::Range(1, 1000000)));
  of_random_maps(gain->add_option("--streams", options->streams, "n")->check(CLI::Range(1, 8)));
  of_random_maps(gain->add_option("--repeat", options->repeat, "rounds of Sinkhorn's iteration")
                     ->check(CLI::Range(1, 64)));
  of_random_maps(gain->add_option("--eps", options->eps, "eps of the iteration")
                     ->check(number_between(0, 1e30)));
  of_random_maps(
      gain->add_option("--scale", options->scale,
                       "deviation of the random logits, which are the unconstrained maps")
          ->check(number_between(0, 1e30)));
  of_random_maps(gain->add_option("--seed", options->seed, "other random logits"));
  of_random_maps(gain->add_option("--convention", options->convention, "deepseek, megatron or log")
                     ->transform(CLI::CheckedTransformer(std::map<std::string, SinkhornConvention>{
                         {"deepseek", SinkhornConvention::deepseek},
                         {"megatron", SinkhornConvention::megatron},
                         {"log", SinkhornConvention::log}})));
  gain->add_option("--threads", options->threads, "CPU threads; 0 = all")
      ->envname("EHC_THREADS")
      ->check(CLI::Range(0, 1024));
  gain->add_flag("--json", options->as_json, "every layer, as JSON");
  gain->callback([options] { run(*options); });
}

}  // namespace ehc::cli
