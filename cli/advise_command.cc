// `ehc advise`: bytes, operations and the side of the ridge of a call, and what would run it here.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/advise.h"
#include "cli/commands.h"
#include "cli/selection.h"

namespace ehc::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::string name;
  std::vector<std::string> shape;
  std::vector<std::string> set;
  std::vector<std::string> with;
  std::string dtype = "BF16";
  std::string device = "cpu";
  double bandwidth = ModelDevice{}.bandwidth * 1e-9;
  double peak = ModelDevice{}.peak * 1e-9;
  bool as_json = false;
};

std::string joined(const std::vector<std::string>& words, const char* between) {
  std::string text;
  for (const std::string& word : words) text += (text.empty() ? "" : between) + word;
  return text;
}

CaseLine line_of(const Operator& op, const Options& o) {
  CaseLine line;
  line.op = op.schema.name;
  const auto is_symbol = [&](const std::string& key) {
    return std::any_of(std::begin(kSymbols), std::end(kSymbols),
                       [&](const SymbolInfo& info) { return info.name == key; });
  };
  for (const auto& [key, value] : split_settings("--shape", o.shape)) {
    const bool digits = !value.empty() && value.size() < 19 &&
                        value.find_first_not_of("0123456789") == std::string::npos;
    if (!is_symbol(key)) {
      throw UsageError("--shape: expected a symbol of ehc op --list, got '" + key + "'");
    }
    if (!digits) {
      throw UsageError("--shape: expected " + key + " as an integer >= 0, got '" + value + "'");
    }
    line.set(key, value);
  }
  for (const TensorSpec& spec : op.schema.tensors) {
    if (spec.dtype_rule == DTypeRule::activation) line.set("A", o.dtype);
  }
  for (const auto& [key, value] : split_settings("--set", o.set)) line.set(key, value);
  if (!o.with.empty()) line.set("with", joined(o.with, ","));
  return line;
}

Json to_json(const Advice& a, const ModelDevice& device) {
  Json out = {{"call", a.call},
              {"assumed", a.assumed},
              {"batch_axis", a.batch_axis},
              {"batch", a.batch},
              {"bytes",
               {{"batch", static_cast<int64_t>(a.traffic.batch)},
                {"shared", static_cast<int64_t>(a.traffic.shared)},
                {"partials", static_cast<int64_t>(a.traffic.partials)},
                {"workspace", static_cast<int64_t>(a.traffic.workspace)}}},
              {"flops", a.flops},
              {"intensity", a.intensity()},
              {"ridge", device.ridge()},
              {"bound_by", a.intensity() < device.ridge() ? "bandwidth" : "arithmetic"},
              {"seconds_of_bytes", a.seconds_of_bytes(device)},
              {"seconds_of_flops", a.seconds_of_flops(device)},
              {"crosses_blocks", a.crosses_blocks},
              {"implementation", a.implementation},
              {"workspace_bytes", a.workspace_bytes}};
  out["refused"] = Json::object();
  for (const auto& [name, reason] : a.refused) out["refused"][name] = reason;
  return out;
}

void print(const Advice& a, const ModelDevice& device) {
  fmt::print("{}\n", a.call);
  const auto row = [](const char* label, const std::string& text) {
    fmt::print("  {:<14} {}\n", label, text);
  };
  if (!a.assumed.empty()) row("assumed", joined(a.assumed, " "));
  const bool per_item = !a.batch_axis.empty() && a.batch > 0;
  const auto quantity = [&](double all, const char* unit) {
    if (!per_item) return fmt::format("{:.0f} {}", all, unit);
    return fmt::format("{:.10g} {} for each of {} = {}, {:.4g} {} in all",
                       all / static_cast<double>(a.batch), unit, a.batch_axis, a.batch, all, unit);
  };
  if (a.traffic.batch > 0) row("batch", quantity(a.traffic.batch, "bytes"));
  if (a.traffic.shared > 0) row("shared", fmt::format("{:.0f} bytes", a.traffic.shared));
  if (a.traffic.partials > 0) row("partial sums", fmt::format("{:.0f} bytes", a.traffic.partials));
  if (a.traffic.workspace > 0) row("workspace", fmt::format("{:.0f} bytes", a.traffic.workspace));
  row("operations",
      a.flops > 0 ? quantity(static_cast<double>(a.flops), "FLOP") : "none in floating point");
  row("intensity",
      fmt::format("{:.3g} FLOP/byte, {} the ridge of {:.3g} ({:.4g} GFLOP/s, {:.4g} GB/s): {}",
                  a.intensity(), a.intensity() < device.ridge() ? "below" : "above", device.ridge(),
                  device.peak * 1e-9, device.bandwidth * 1e-9,
                  a.intensity() < device.ridge() ? "bandwidth decides" : "arithmetic decides"));
  row("at these rates",
      fmt::format("{:.4g} us for the bytes, {:.4g} us for the operations",
                  a.seconds_of_bytes(device) * 1e6, a.seconds_of_flops(device) * 1e6));
  row("reduction", a.crosses_blocks ? "crosses blocks: partial sums, then their sum in fixed order"
                                    : "stays within a block");
  row("runs here", a.workspace_bytes == 0 ? a.implementation
                                          : fmt::format("{}, {} bytes of workspace",
                                                        a.implementation, a.workspace_bytes));
  for (const auto& [name, reason] : a.refused) row("refused", name + ": " + reason);
}

void run(const Options& o) {
  const Operator& op = *select_operators({o.name}).front();
  const ModelDevice device{o.bandwidth * 1e9, o.peak * 1e9};
  const Context context = o.device == "cuda" ? Context::cuda(0, nullptr) : Context::cpu();
  const Advice advice = advise(op, line_of(op, o), context);
  if (o.as_json) {
    fmt::print("{}\n", to_json(advice, device).dump(1));
  } else {
    print(advice, device);
  }
}

// Range accepts NaN.
std::string refuse_rate(const std::string& text) {
  double rate = 0;
  if (CLI::detail::lexical_cast(text, rate) && rate > 0 && rate <= 1e12) return {};
  return "expected a rate above 0, at most 1e12, got '" + text + "'";
}

}  // namespace

void add_advise_command(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* advise = app.add_subcommand(
      "advise", "Show the bytes and operations of a call, and what would run it here");
  advise->add_option("operator", options->name, "operator, e.g. mhc.post_fwd")->required();
  advise->add_option("--shape", options->shape, "sizes, e.g. T=8192,n=4,d=4096")->delimiter(',');
  advise->add_option("--with", options->with, "optional inputs that are there")->delimiter(',');
  advise->add_option("--set", options->set, "attribute or dtype, key=value")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  advise->add_option("--dtype", options->dtype, "type of the activations: BF16, F16 or F32")
      ->check(CLI::IsMember({"BF16", "F16", "F32"}));
  advise->add_option("--device", options->device, "cpu or cuda: where it would run")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  advise->add_option("--bandwidth", options->bandwidth, "GB/s of the ridge")->check(&refuse_rate);
  advise->add_option("--peak", options->peak, "GFLOP/s of the ridge")->check(&refuse_rate);
  advise->add_flag("--json", options->as_json, "as JSON");
  advise->callback([options] { run(*options); });
}

}  // namespace ehc::cli
