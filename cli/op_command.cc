// `ehc op`: runs one operator on the tensors of a file. Contract: exit codes, one line per error,
// nothing written on failure.
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <nlohmann/json.hpp>

#include "cli/commands.h"
#include "cli/op_file.h"
#include "cli/op_list.h"
#include "cli/output_path.h"
#include "cli/selection.h"
#include "core/registry.h"
#include "ehc/error.h"

namespace ehc::cli {

namespace {

struct Options {
  std::string name;
  std::string in;
  std::string out;
  std::string device = "cpu";
  std::string implementation;
  std::vector<std::string> set;
  int threads = 0;
  bool check = false;
  bool list = false;
  bool as_json = false;
};

void require_known_implementation(const Operator& op, const std::string& wanted) {
  if (wanted.empty()) return;
  std::string known;
  for (const Implementation& impl : op.implementations) {
    if (names_implementation(wanted, impl.name)) return;
    known += " " + std::string(impl.name);
  }
  throw UsageError("--impl: expected one of" + known + ", got '" + wanted + "'");
}

bool print_comparison(const OpFile& file, const std::map<std::string, Tolerance>& rules,
                      const OpResult& result) {
  bool all_equal = true;
  fmt::print("{:<28} {:>12} {:>12} {:>12}  {}\n", "output", "max error", "max ulp", "calc_diff",
             "verdict");
  for (const OpResult::Output& output : result.outputs) {
    const auto expected = file.expected.find(output.name);
    if (expected == file.expected.end()) {
      fmt::print("{:<28} {:>12} {:>12} {:>12}  not compared\n", output.name, "-", "-", "-");
      continue;
    }
    const auto rule = rules.find(output.name);
    const Comparison c = compare(
        output.tensor, expected->second,
        rule != rules.end() ? rule->second : default_tolerance(expected->second), output.partial);
    all_equal = all_equal && c.equal;
    const std::string verdict =
        c.equal ? "ok"
                : (c.note.empty() ? fmt::format("DIFFERENT ({} elements)", c.failing)
                                  : "DIFFERENT (" + c.note + ")");
    fmt::print("{:<28} {:>12.3e} {:>12.3g} {:>12.3e}  {}\n", output.name, c.max_error, c.max_ulp,
               c.calc_diff, verdict);
  }
  for (const auto& [name, tensor] : file.expected) {
    bool made = false;
    for (const OpResult::Output& output : result.outputs) made = made || output.name == name;
    if (made) continue;
    all_equal = false;
    fmt::print("{:<28} {:>12} {:>12} {:>12}  DIFFERENT (not an output of this call)\n", name, "-",
               "-", "-");
  }
  // Before the output file is written: a failure leaves none.
  if (std::fflush(stdout) != 0) throw Error(ErrorKind::io, "standard output: cannot write");
  return all_equal;
}

void run(const Options& o) {
  if (o.list) {
    print_operator_list(o.as_json);
    return;
  }
  if (o.name.empty()) throw UsageError("op: expected an operator name; see 'ehc op --list'");
  const Operator* op = select_operators({o.name}).front();
  if (o.device != "cpu" && o.device != "cuda") {
    throw UsageError("--device: expected cpu or cuda, got '" + o.device + "'");
  }
  require_known_implementation(*op, o.implementation);
  const Settings settings = split_settings("--set", o.set);
  bool has_inputs = false;
  for (const TensorSpec& s : op->schema.tensors) has_inputs = has_inputs || !s.is_output;
  if (o.in.empty() && (has_inputs || o.check)) throw UsageError(o.name + ": missing --in");
  if (o.out.empty() && !o.check) throw UsageError(o.name + ": missing --out");

  std::unique_ptr<tables::SafetensorsFile> input;
  if (!o.in.empty()) {
    input = std::make_unique<tables::SafetensorsFile>(tables::SafetensorsFile::open(o.in));
  }
  if (!o.out.empty()) require_writable(o.out);

  const OpFile file = input ? read_op_file(*input) : OpFile{};
  DynamicCall call(*op);
  const auto rules = bind_op_file(call, file, settings);
  const OpResult result =
      run_call(call, o.device == "cpu" ? Device::cpu : Device::cuda, o.implementation, o.threads);

  const bool equal = !o.check || print_comparison(file, rules, result);
  if (!o.out.empty()) {
    std::vector<tables::NamedTensor> tensors;
    for (const OpResult::Output& output : result.outputs) {
      tensors.push_back({output.name, output.tensor});
    }
    tables::write_safetensors(o.out, tensors);
  }
  if (!equal) {
    fmt::print(stderr, "ehc: {}: the outputs differ from those expected in {}\n", o.name, o.in);
    throw Exit{kDifferent};
  }
}

}  // namespace

void add_op_command(CLI::App& app) {
  auto options = std::make_shared<Options>();
  CLI::App* op = app.add_subcommand("op", "Run an operator on the tensors of a safetensors file");
  op->add_option("name", options->name, "operator, e.g. engram.gate_fwd");
  op->add_option("--in", options->in, "safetensors file with the inputs");
  op->add_option("--out", options->out, "safetensors file for the outputs");
  op->add_option("--device", options->device, "cpu or cuda");
  op->add_option("--impl", options->implementation, "one implementation; see --list --json");
  op->add_option("--set", options->set, "attribute, key=value")
      ->allow_extra_args(false)
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll);
  op->add_option("--threads", options->threads, "CPU threads; 0 = all")
      ->envname("EHC_THREADS")
      ->check(CLI::Range(0, 1024));
  op->add_flag("--check", options->check, "compare with the tensors expected.*");
  op->add_flag("--list", options->list, "list the operators of this build");
  op->add_flag("--json", options->as_json, "with --list: in full, as JSON");
  op->callback([options] { run(*options); });
}

}  // namespace ehc::cli
