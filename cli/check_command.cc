// `ehc check`: every implementation against the reference, over the case files.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/check.h"
#include "cli/commands.h"
#include "cli/output_path.h"
#include "cli/progress.h"
#include "cli/selection.h"
#include "core/file_io.h"

namespace ehc::cli {

namespace {

struct Options {
  std::vector<std::string> operators;
  std::string device = "cpu";
  std::string implementation;
  std::string cases;
  int intensity = 1;
  int level = 0;
  size_t most = 0;
  std::string slice = "1/1";
  int repeats = 50;
  bool once = false;
  std::string json;
};

using Json = nlohmann::ordered_json;

Json to_json(const Operator& op, const CheckRow& row) {
  return {{"op", op.schema.name},
          {"implementation", row.implementation},
          {"cases", row.cases},
          {"refused", row.refused},
          {"worst_error", row.worst_error},
          {"worst_used", row.worst_used},
          {"calc_diff", row.worst_diff},
          {"failures", row.failures}};
}

// "3/12": of twelve parts the third.
void parse_slice(const std::string& text, CheckOptions& options) {
  size_t part = 0;
  size_t parts = 0;
  int end = 0;
  if (std::sscanf(text.c_str(), "%zu/%zu%n", &part, &parts, &end) != 2 ||
      static_cast<size_t>(end) != text.size() || part < 1 || part > parts) {
    throw UsageError("check: --slice: expected I/N with 1 <= I <= N, got '" + text + "'");
  }
  options.slice = part - 1;
  options.slices = parts;
}

void run(const Options& o) {
  CheckOptions options{.device = o.device == "cuda" ? Device::cuda : Device::cpu,
                       .implementation = o.implementation,
                       .intensity = o.intensity,
                       .level = o.level,
                       .most = o.most,
                       .repeats = o.repeats,
                       .once = o.once};
  parse_slice(o.slice, options);
  if (!o.json.empty()) require_writable(o.json);
  if (options.device == Device::cuda) (void)Context::cuda(0, nullptr);  // tell first
  const std::vector<const Operator*> operators = select_operators(o.operators);
  const std::vector<CaseLine> lines = select_cases(check_case_texts(), o.cases);

  std::vector<CheckFailure> failures;
  Json rows = Json::array();
  size_t checked = 0;
  size_t done = 0;
  size_t named = 0;
  const auto parts = std::count_if(lines.begin(), lines.end(),
                                   [&](const CaseLine& line) { return takes_part(line, options); });
  Progress progress("check", static_cast<size_t>(parts));
  fmt::print("{:<26} {:<16} {:>6} {:>8} {:>12} {:>10} {:>12}  {}\n", "operator", "implementation",
             "cases", "refused", "worst error", "of allowed", "calc_diff", "verdict");
  for (const Operator* op : operators) {
    const CheckReport report = check_operator(
        *op, lines, options, [&](size_t) { progress.show(++done, std::string(op->schema.name)); });
    for (const CaseLine& line : lines) named += line.op == op->schema.name ? 1 : 0;
    progress.clear();
    for (const CheckRow& row : report.rows) {
      checked += static_cast<size_t>(row.cases);
      const std::string verdict = row.failures > 0  ? fmt::format("{} DIFFERENT", row.failures)
                                  : row.cases > 0   ? "ok"
                                  : row.refused > 0 ? "refused"
                                                    : "no cases";
      fmt::print("{:<26} {:<16} {:>6} {:>8} {:>12.3e} {:>10.3f} {:>12.3e}  {}\n", op->schema.name,
                 row.implementation, row.cases, row.refused, row.worst_error, row.worst_used,
                 row.worst_diff, verdict);
      rows.push_back(to_json(*op, row));
    }
    std::fflush(stdout);
    failures.insert(failures.end(), report.failures.begin(), report.failures.end());
  }
  if (!o.json.empty()) {
    const std::string text =
        Json{{"device", o.device}, {"repeats", o.repeats}, {"rows", rows}}.dump(1) + "\n";
    const std::string_view parts_of_file[] = {text};
    write_file(o.json, parts_of_file);
  }
  if (named == 0) throw UsageError("check: no case names one of these operators");
  if (checked == 0 && failures.empty() && options.slices == 1) {
    throw UsageError("check: no implementation '" + o.implementation + "' on device " + o.device +
                     " ran any case");
  }
  if (failures.empty()) return;
  fmt::print("\n");
  for (const CheckFailure& f : failures) {
    fmt::print("{}\n    # {}: {}\n", f.line, f.implementation, f.what);
  }
  std::fflush(stdout);
  fmt::print(stderr, "ehc: check: {} differences\n", failures.size());
  throw Exit{kDifferent};
}

}  // namespace

void add_check_command(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* check =
      app.add_subcommand("check", "Compare every implementation with the reference, over cases");
  check->add_option("operators", options->operators, "operators; all when left out");
  check->add_option("--device", options->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  check->add_option("--impl", options->implementation, "one implementation or family, e.g. cpu");
  check->add_option("--cases", options->cases, "file of cases; see docs/cases.md");
  check->add_option("--intensity", options->intensity, "1 quick, 2 thorough, 3 long")
      ->check(CLI::Range(1, 3));
  check->add_option("--level", options->level, "cases of this level alone")
      ->check(CLI::Range(1, 3));
  check->add_option("--json", options->json, "file for the results");
  check->add_option("--most", options->most,
                    "so many cases of each operator, spread over its list; 0: all");
  check->add_option("--slice", options->slice,
                    "3/12: every twelfth of an operator's cases from the third on");
  check->add_option("--repeats", options->repeats, "runs of a case that must be alike, on a device")
      ->check(CLI::Range(0, 100000));
  check->add_flag("--once", options->once,
                  "each case in its layout alone, on a device with every grid");
  check->callback([options] { run(*options); });
}

}  // namespace ehc::cli
