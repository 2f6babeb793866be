// `ehc streams`: the streams of a text through a stack of mHC sublayers, timed, checked and
// explained in JSON.
#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cli/checksum.h"
#include "cli/commands.h"
#include "cli/copy_rate.h"
#include "cli/defect_curve.h"
#include "cli/gain.h"
#include "cli/memory_limit.h"
#include "cli/option_checks.h"
#include "cli/output_path.h"
#include "cli/progress.h"
#include "cli/stack.h"
#include "core/bind.h"
#include "core/file_io.h"
#include "core/float_formats.h"
#include "core/tensor_bytes.h"
#include "ehc/error.h"
#include "ehc/version.h"
#include "tables/safetensors.h"

namespace ehc::cli {
namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string in, json, out;
  StackConfig stack;
  int64_t tokens = 0;
  int64_t map_begin = 0;
  int64_t map_tokens = 6;
  int64_t map_sublayers = 4;
  int threads = 0;
};

// Rounds and logits of the curves; as many random maps say what the worst of a text looks like.
constexpr int64_t kRepeats[] = {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 40, 48, 64};
constexpr double kSpreads[] = {1, 2, 4};
constexpr int64_t kRandomMaps = 4096;
constexpr int64_t kRandomStacks = 256;

Tensor usable_streams(const tables::SafetensorsFile& file, const std::string& path, int64_t limit) {
  const Tensor streams = file.find("streams");
  const bool is_float =
      streams.dtype == DType::bf16 || streams.dtype == DType::f16 || streams.dtype == DType::f32;
  if (!is_float || streams.rank != 3 || streams.shape[0] < 1 || streams.shape[1] < 1 ||
      streams.shape[1] > 8 || streams.shape[2] < 1) {
    throw Error(ErrorKind::contract,
                path +
                    ": tensor 'streams': expected BF16, F16 or F32[T,n,d] with n from 1 to 8 and T "
                    "and d above 0, got " +
                    describe(streams));
  }
  const int64_t tokens = limit > 0 ? std::min(limit, streams.shape[0]) : streams.shape[0];
  const Tensor used = streams.slice(0, 0, tokens);
  for (int64_t i = 0; i < used.numel(); ++i) {
    const float x = load_float(used.data, used.dtype, i);
    if (std::isfinite(x)) continue;
    throw Error(ErrorKind::contract,
                fmt::format("{}: tensor 'streams': expected finite values, got {} at position {}",
                            path, x, i));
  }
  return used;
}

void require_memory_for(const Tensor& streams, const StackConfig& config) {
  const auto number = [](int64_t x) { return static_cast<double>(x); };
  const double n = number(streams.shape[1]);
  const double d = number(streams.shape[2]);
  const double mixes = n * n + 2 * n;
  const double size = number(static_cast<int64_t>(size_of(streams.dtype)));
  const double sublayers = number(config.sublayers);
  const double chunk = number(std::min(config.chunk, streams.shape[0]));
  const double wanted =
      3 * number(streams.shape[0]) * n * d * size +              // streams, before and after
      sublayers * number(streams.shape[0]) * 2 * mixes * 4 +     // maps, pre and post
      sublayers * 8 * ((mixes + 1) * n * d + d) +                // parameters and gradients
      sublayers * chunk * ((n + 2) * d * size + 4 * 2 * mixes);  // what a backward pass needs
  require_memory(wanted, "streams, weights and chunk", "fewer --tokens, --sublayers or --chunk");
}

Json configuration_json(const Options& options, const Tensor& streams, const Context& context) {
  const StackConfig& config = options.stack;
  return {{"tokens", streams.shape[0]},
          {"streams", streams.shape[1]},
          {"width", streams.shape[2]},
          {"type", name_of(streams.dtype)},
          {"sublayers", config.sublayers},
          {"chunk", config.chunk},
          {"threads", context.executor().concurrency()},
          {"spread", config.spread},
          {"repeat", config.mix.repeat},
          {"eps", config.mix.sinkhorn_eps},
          {"seed", config.seed}};
}

Json curve_json(const std::string& name, int64_t maps, const std::vector<DefectPoint>& points) {
  Json json{{"logits", name}, {"maps", maps}};
  for (const DefectPoint& p : points) {
    json["repeat"].push_back(p.repeat);
    json["row_worst"].push_back(p.row_worst);
    json["row_median"].push_back(p.row_median);
    json["column_worst"].push_back(p.column_worst);
    json["column_median"].push_back(p.column_median);
  }
  return json;
}

Json sinkhorn_json(Context& context, const Stack& stack, const StackConfig& config) {
  const int64_t n = stack.comb_logits().shape[2];
  Json curves = Json::array();
  for (const double spread : kSpreads) {
    const HostTensor logits = random_logits(context, 1, kRandomMaps, n, spread, config.seed);
    curves.push_back(curve_json(fmt::format("{:g}", spread), kRandomMaps,
                                defect_curve(context, logits.tensor, kRepeats, config.mix)));
  }
  curves.push_back(curve_json("text", stack.comb().shape[0] * stack.comb().shape[1],
                              defect_curve(context, stack.comb_logits(), kRepeats, config.mix)));
  return curves;
}

// With and without Sinkhorn: the maps of the text, and random ones of the same spread.
Json gain_json(Context& context, const Stack& stack, const StackConfig& config) {
  const HostTensor logits = random_logits(context, config.sublayers, kRandomStacks,
                                          stack.comb().shape[2], config.spread, config.seed);
  const HostTensor maps = constrained_maps(context, logits.tensor, config.mix.repeat,
                                           config.mix.sinkhorn_eps, config.mix.convention);
  return {{"text",
           {{"constrained", gains_json(gains_of(context, stack.comb()))},
            {"unconstrained", gains_json(gains_of(context, stack.comb_logits()))}}},
          {"random",
           {{"constrained", gains_json(gains_of(context, maps.tensor))},
            {"unconstrained", gains_json(gains_of(context, logits.tensor))}}}};
}

// The values of a token in one sublayer, nested like the tensor.
Json nested(const Tensor& t) {
  const auto* values = t.as<float>();
  if (t.rank == 1) return std::vector<float>(values, values + t.shape[0]);
  Json rows = Json::array();
  for (int64_t i = 0; i < t.shape[0]; ++i) rows.push_back(nested(t.select(0, i)));
  return rows;
}

// Some sublayers, the first and the last among them, and some tokens.
Json maps_json(const Stack& stack, const Options& options) {
  const int64_t sublayers = stack.comb().shape[0];
  const int64_t shown = std::min(options.map_sublayers, sublayers);
  const int64_t begin = std::min(options.map_begin, stack.comb().shape[1]);
  const int64_t end = begin + std::min(options.map_tokens, stack.comb().shape[1] - begin);
  Json json{{"first_token", begin}, {"sublayers", Json::array()}};
  for (int64_t i = 0; i < shown; ++i) {
    const int64_t l = shown == 1 ? 0 : i * (sublayers - 1) / (shown - 1);
    json["sublayers"].push_back(l);
    json["pre"].push_back(nested(stack.pre().select(0, l).slice(0, begin, end)));
    json["post"].push_back(nested(stack.post().select(0, l).slice(0, begin, end)));
    json["comb"].push_back(nested(stack.comb().select(0, l).slice(0, begin, end)));
  }
  return json;
}

Json checksums_json(const Stack& stack) {
  Json json;
  for (const tables::NamedTensor& entry : stack.results()) {
    Checksum sum;
    sum.add(entry.tensor);
    json[entry.name] = sum.text();
  }
  return json;
}

Json run_streams(const Options& options) {
  const auto file = tables::SafetensorsFile::open(options.in);
  const Tensor streams = usable_streams(file, options.in, options.tokens);
  const StackConfig& config = options.stack;
  require_memory_for(streams, config);
  Context context = Context::cpu(options.threads);
  const double ceiling = CopyRate(context).measure();
  Stack stack(context, streams, config);
  const int64_t tokens = streams.shape[0];
  {
    Progress progress("through the stack", static_cast<size_t>(tokens));
    for (int64_t done = 0; done < tokens; done = stack.run_chunk()) {
      progress.show(static_cast<size_t>(done), "tokens");
    }
  }

  Json json;
  json["version"] = EHC_VERSION_STRING;
  json["configuration"] = configuration_json(options, streams, context);
  json["copy_gb_per_second"] = ceiling * 1e-9;
  json["stages"] = stages_json(stack.times(), ceiling);
  json["passes"] = stages_json(stack.passes(), ceiling);
  json["sinkhorn"] = sinkhorn_json(context, stack, config);
  json["maps"] = maps_json(stack, options);
  json["gain"] = gain_json(context, stack, config);
  json["checks"] = stack.checks().to_json();
  json["checksums"] = checksums_json(stack);
  if (!options.out.empty()) tables::write_safetensors(options.out, stack.results());
  return json;
}

void run(const Options& options) {
  for (const std::string& path : {options.json, options.out}) {
    if (!path.empty()) require_writable(path);
  }
  const Json json = run_streams(options);
  if (!options.json.empty()) {
    const std::string text = json.dump(1) + "\n";
    const std::string_view parts[] = {text};
    write_file(options.json, parts);
  }
  Json lines = json["stages"];
  lines.insert(lines.end(), json["passes"].begin(), json["passes"].end());
  print_stages(lines);
  fmt::print("streams {}  their gradient {}\n", json["checksums"]["streams"].get<std::string>(),
             json["checksums"]["grad_streams"].get<std::string>());
  require_equal(json["checks"]);
}

}  // namespace

void add_streams_command(CLI::App& app) {
  auto o = std::make_shared<Options>();
  CLI::App* command = app.add_subcommand(
      "streams",
      "Run the streams of a text through a stack of mHC sublayers with random weights, forward and "
      "backward");
  command
      ->add_option("--in", o->in,
                   "safetensors file with streams A[T,n,d] (ehc pipeline --save-streams)")
      ->required();
  command->add_option("--json", o->json, "file to write all figures to");
  command->add_option("--out", o->out,
                      "safetensors file for streams, coefficients and all gradients");
  command->add_option("--tokens", o->tokens, "read only this many tokens (default: all)")
      ->check(CLI::PositiveNumber);
  command->add_option("--sublayers", o->stack.sublayers, "sublayers of the stack")
      ->check(CLI::Range(1, 1024))
      ->capture_default_str();
  command->add_option("--chunk", o->stack.chunk, "tokens at a time")
      ->check(CLI::Range(1, 1 << 20))
      ->capture_default_str();
  command
      ->add_option("--spread", o->stack.spread,
                   "deviation of the logits of the mixing maps, 0 to 100")
      ->check(number_between(0, 100))
      ->capture_default_str();
  command->add_option("--repeat", o->stack.mix.repeat, "rounds of Sinkhorn's iteration")
      ->check(CLI::Range(1, 64))
      ->capture_default_str();
  command->add_option("--seed", o->stack.seed, "of the weights and of the last streams' gradient")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--map-begin", o->map_begin, "first token whose maps are listed")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--map-tokens", o->map_tokens, "how many")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--map-sublayers", o->map_sublayers, "of how many sublayers")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command
      ->add_option("--check-tokens", o->stack.check_tokens,
                   "tokens of every sublayer that are compared with the reference")
      ->check(CLI::NonNegativeNumber)
      ->capture_default_str();
  command->add_option("--threads", o->threads, "0: all cores")
      ->envname("EHC_THREADS")
      ->check(CLI::Range(0, 1024));
  command->callback([o] { run(*o); });
}

}  // namespace ehc::cli
