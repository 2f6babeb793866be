// The subcommands of `ehc`, one file each. A command throws ehc::Error or UsageError; main turns
// them into one line on stderr and an exit code.
#pragma once

#include <stdexcept>

namespace CLI {
class App;
}

namespace ehc::cli {

// Exit codes of `ehc`; docs/c-api.md says what 3 to 5 mean.
enum ExitCode { kDone = 0, kDifferent = 1, kUsage = 2, kContract = 3, kFile = 4, kUnavailable = 5 };

struct UsageError : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A command that ends with another code than 0 without an error of its own (`op --check`).
struct Exit {
  int code;
};

void add_op_command(CLI::App& app);
void add_info_command(CLI::App& app);
void add_tokmap_command(CLI::App& app);
void add_layout_command(CLI::App& app);
void add_check_command(CLI::App& app);
void add_bench_command(CLI::App& app);
void add_pipeline_command(CLI::App& app);
void add_streams_command(CLI::App& app);
void add_train_command(CLI::App& app);
void add_advise_command(CLI::App& app);
void add_gain_command(CLI::App& app);
void add_plan_command(CLI::App& app);

}  // namespace ehc::cli
