// `ehc bench`: time, bytes and rate of operators, beside the copy rate of the same run.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <thread>

#include "cli/bench.h"
#include "cli/commands.h"
#include "cli/copy_rate.h"
#include "cli/fma_rate.h"
#include "cli/output_path.h"
#include "cli/progress.h"
#include "cli/selection.h"
#include "core/cuda_graph.h"
#include "core/cuda_support.h"
#include "core/cuda_timing.h"
#include "core/file_io.h"
#include "ehc/error.h"
#include "ehc/version.h"

namespace ehc::cli {

namespace {

using Json = nlohmann::ordered_json;

struct Options {
  std::vector<std::string> operators;
  std::string device = "cpu";
  std::string implementation;
  std::string cases;
  std::string json;
  int threads = 0;
  int intensity = 1;
  double seconds = 1;
  bool first_call = false;
};

// Operations for each byte from which arithmetic may bound an operator.
constexpr double kArithmeticBounds = 8;

struct Row {
  std::string line;
  double bytes = 0;
  double flops = 0;  // 0: none in floating point
  double tokens = 0;
  Timing timing;
  double reference_seconds = 0;  // 0: the reference was not timed
  [[nodiscard]] bool shows_fma() const { return flops >= kArithmeticBounds * bytes; }
};

// Which implementations to time; empty: the library's choice.
std::vector<std::string> implementations(const Operator& op, const Options& o, Device device) {
  std::vector<std::string> names;
  if (o.implementation.empty()) {
    names.emplace_back();
  } else {
    for (const Implementation& impl : op.implementations) {
      if (impl.device != device) continue;
      if (o.implementation == "all" || names_implementation(o.implementation, impl.name)) {
        names.emplace_back(impl.name);
      }
    }
  }
  // An operator on integers is measured against the plain loops too: they are what one would write.
  bool integers = device == Device::cpu;
  for (const Implementation& impl : op.implementations) {
    if (impl.name == "reference.f32") integers = false;
  }
  const bool has_reference = std::find(names.begin(), names.end(), "reference") != names.end();
  if (integers && !has_reference && !names.empty()) names.emplace_back("reference");
  return names;
}

std::string time_text(double seconds) {
  if (seconds < 1e-3) return fmt::format("{:.2f} us", seconds * 1e6);
  if (seconds < 1) return fmt::format("{:.3f} ms", seconds * 1e3);
  return fmt::format("{:.3f} s", seconds);
}

// The highest rates of this run.
struct Ceilings {
  double copy = 0;  // bytes per second
  double fma = 0;   // operations per second; 0: not measured
};

void print_rows(const std::vector<Row>& rows, const Ceilings& ceilings) {
  std::string line;
  for (const Row& row : rows) {
    if (row.line != line) {
      line = row.line;
      fmt::print("{}\n", line);
    }
    const Timing& t = row.timing;
    const double rate = row.bytes / t.rated;
    const std::string factor =
        row.reference_seconds > 0 ? fmt::format("{:.2f}", row.reference_seconds / t.rated) : "-";
    const std::string of_fma = row.shows_fma() && ceilings.fma > 0
                                   ? fmt::format("{:.3f}", row.flops / t.rated / ceilings.fma)
                                   : "-";
    fmt::print("  {:<16} {:>12} {:>12} {:>10.2f} {:>8.3f} {:>8} {:>12.4g} {:>12}\n",
               t.implementation, time_text(t.best), time_text(t.median), rate * 1e-9,
               rate / ceilings.copy, of_fma, row.tokens / t.rated, factor);
  }
}

Json to_json(const Row& row, const Ceilings& ceilings) {
  const Timing& t = row.timing;
  Json out = {{"op", row.line.substr(0, row.line.find(' '))},
              {"case", row.line},
              {"implementation", t.implementation},
              {"best_seconds", t.best},
              {"median_seconds", t.median},
              {"repeats", t.repeats},
              {"bytes", row.bytes},
              {"bytes_per_second", row.bytes / t.rated},
              {"share_of_copy", row.bytes / t.rated / ceilings.copy},
              {"tokens_per_second", row.tokens / t.rated}};
  if (row.flops > 0) out["flops_per_second"] = row.flops / t.rated;
  if (row.shows_fma() && ceilings.fma > 0) out["share_of_fma"] = row.flops / t.rated / ceilings.fma;
  if (row.reference_seconds > 0) out["times_reference"] = row.reference_seconds / t.rated;
  return out;
}

std::vector<Row> time_case(const Operator& op, const CaseLine& line, const Context& context,
                           const Options& o) {
  const CaseInputs inputs(op, line);
  BenchCase bench(inputs, context);
  std::vector<Row> rows;
  double reference = 0;
  for (const std::string& name : implementations(op, o, context.device())) {
    Row row{line.text(), bench.bytes(), bench.flops(), static_cast<double>(inputs.tokens()), {}, 0};
    row.timing = bench.time(name, o.seconds);
    if (row.timing.implementation.empty()) continue;
    if (row.timing.implementation == "reference") reference = row.timing.best;
    rows.push_back(row);
  }
  for (Row& row : rows) row.reference_seconds = reference;
  return rows;
}

// Range accepts NaN.
std::string refuse_seconds(const std::string& text) {
  double seconds = 0;
  if (CLI::detail::lexical_cast(text, seconds) && seconds > 0 && seconds <= 3600) return {};
  return "expected seconds above 0, at most 3600, got '" + text + "'";
}

// On the first case of `ehc check` that has no empty input.
void run_first_call(const Options& o) {
  if (o.operators.size() != 1) {
    throw UsageError(
        "bench: --first-call: expected one operator, because a process has one first "
        "call");
  }
  const Operator& op = *select_operators(o.operators).front();
  for (const CaseLine& line : select_cases(check_case_texts(), o.cases)) {
    if (line.op != op.schema.name) continue;
    const CaseInputs inputs(op, line);
    const auto is_empty = [](const Tensor& t) { return t.present() && t.numel() == 0; };
    if (std::any_of(inputs.tensors().begin(), inputs.tensors().end(), is_empty)) continue;
    const FirstCall t = time_first_call(inputs, o.device == "cuda" ? Device::cuda : Device::cpu);
    fmt::print("{:<28} first {:.3f} ms, second {:.3f} ms, device started in {:.0f} ms\n",
               op.schema.name, t.first * 1e3, t.second * 1e3, t.start * 1e3);
    return;
  }
  throw UsageError("bench: no case names one of these operators");
}

void run(const Options& o) {
  if (o.first_call) return run_first_call(o);
  if (!o.json.empty()) require_writable(o.json);
  std::optional<cuda_graph::Stream> stream;
  if (o.device == "cuda") {
    cuda_support::require_device(0);
    stream.emplace(0);
  }
  const Context context = stream ? Context::cuda(0, stream->get()) : Context::cpu(o.threads);
  const std::vector<const Operator*> operators = select_operators(o.operators);
  std::vector<CaseLine> lines;
  for (const CaseLine& line : select_cases(bench_case_texts(), o.cases)) {
    const bool wanted = std::any_of(operators.begin(), operators.end(),
                                    [&](const Operator* op) { return op->schema.name == line.op; });
    if (wanted && line.level <= o.intensity) lines.push_back(line);
  }
  if (lines.empty()) throw UsageError("bench: no case names one of these operators");

  Json results = Json::array();
  Json calls = Json::array();
  size_t done = 0;
  Ceilings ceilings;
  Progress progress("bench", lines.size());
  CopyRate copy(context);
  FmaRate fma(context);
  fmt::print("{:<18} {:>12} {:>12} {:>10} {:>8} {:>8} {:>12} {:>12}\n", "", "best", "median",
             "GB/s", "of copy", "of FMA", "tokens/s", "x reference");
  for (const Operator* op : operators) {
    std::vector<Row> rows;
    bool any = false;
    for (const CaseLine& line : lines) {
      if (line.op != op->schema.name) continue;
      progress.show(done++, line.text());
      if (line.get("measure") == "call") {
        Context own = context;
        const CaseInputs inputs(*op, line);
        const CallCost cost = time_call(inputs, own);
        progress.clear();
        fmt::print("{}\n  front door: check {:.0f} ns, whole call {:.0f} ns\n", line.text(),
                   cost.check, cost.call);
        calls.push_back({{"case", line.text()}, {"check_ns", cost.check}, {"call_ns", cost.call}});
        continue;
      }
      if (!any) ceilings.copy = copy.measure();
      if (context.device() == Device::cpu) ceilings.fma = fma.measure();
      any = true;
      for (Row& row : time_case(*op, line, context, o)) rows.push_back(std::move(row));
    }
    if (!any) continue;
    ceilings.copy = copy.measure();
    if (context.device() == Device::cpu) ceilings.fma = fma.measure();
    progress.clear();
    print_rows(rows, ceilings);
    std::fflush(stdout);
    for (const Row& row : rows) results.push_back(to_json(row, ceilings));
  }
  if (results.empty() && calls.empty()) {
    throw UsageError("bench: no implementation '" + o.implementation + "' on device " + o.device +
                     " ran any case");
  }
  const int threads = context.executor().concurrency();
  if (ceilings.copy > 0) {
    fmt::print("copy: {:.2f} GB/s read and written ({}, {} threads)\n", ceilings.copy * 1e-9,
               copy.best_way(), threads);
  }
  if (copy.read() > 0) {
    fmt::print("read: {:.2f} GB/s; read once, written four times: {:.2f} GB/s\n",
               copy.read() * 1e-9, copy.one_to_four() * 1e-9);
  }
  if (ceilings.fma > 0) {
    fmt::print("fp32 FMA: {:.0f} GFLOP/s ({} threads)\n", ceilings.fma * 1e-9, threads);
  }
  if (o.json.empty()) return;
  Json all = {{"version", EHC_VERSION_STRING},
              {"device", o.device == "cuda" ? cuda_support::describe_device(0) : "cpu"},
              {"threads", threads},
              {"copy_bytes_per_second", ceilings.copy},
              {"fma_flops_per_second", ceilings.fma},
              {"copy_way", copy.best_way()},
              {"results", results},
              {"calls", calls}};
  if (copy.read() > 0) {
    all["read_bytes_per_second"] = copy.read();
    all["one_to_four_bytes_per_second"] = copy.one_to_four();
  }
  const std::string text = all.dump(1) + "\n";
  const std::string_view parts[] = {text};
  write_file(o.json, parts);
}

}  // namespace

void add_bench_command(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* bench = app.add_subcommand("bench", "Time operators and compare with the copy rate");
  bench->add_option("operators", options->operators, "operators; all when left out");
  bench->add_option("--device", options->device, "cpu or cuda")
      ->check(CLI::IsMember({"cpu", "cuda"}));
  bench->add_option("--impl", options->implementation,
                    "one implementation, a family such as cpu, or all");
  bench->add_option("--cases", options->cases, "file of cases; see docs/cases.md");
  bench->add_option("--threads", options->threads, "CPU threads; 0 = all")
      ->envname("EHC_THREADS")
      ->check(CLI::Range(0, 1024));
  bench->add_option("--seconds", options->seconds, "time for each measurement")
      ->check(&refuse_seconds);
  bench->add_option("--json", options->json, "file for the results");
  bench->add_option("--intensity", options->intensity, "1: main sizes, 2 and 3: more")
      ->check(CLI::Range(1, 3));
  bench->add_flag("--first-call", options->first_call,
                  "what the first call of one operator costs in this process, on its first case");
  bench->callback([options] { run(*options); });
}

}  // namespace ehc::cli
