// ehc: run, check and time operators, and make what they read (token maps, table layouts).
#include <fmt/core.h>

#include <CLI/CLI.hpp>
#include <new>

#include "cli/commands.h"
#include "ehc/error.h"
#include "ehc/version.h"

namespace {

int exit_code(ehc::ErrorKind kind) {
  switch (kind) {
    case ehc::ErrorKind::contract:
      return ehc::cli::kContract;
    case ehc::ErrorKind::io:
      return ehc::cli::kFile;
    case ehc::ErrorKind::unavailable:
    case ehc::ErrorKind::internal:
      return ehc::cli::kUnavailable;
  }
  return ehc::cli::kUnavailable;
}

// Errors are one line, whatever was quoted in them.
void print_error(std::string text) {
  for (char& c : text) {
    if (c == '\n' || c == '\r') c = ' ';
  }
  fmt::print(stderr, "ehc: {}\n", text);
}

}  // namespace

int main(int argc, char** argv) {
  CLI::App app{"Engram and mHC operators: run them on files, check them, time them", "ehc"};
  app.set_version_flag("--version", EHC_VERSION_STRING);
  app.require_subcommand(1);
  ehc::cli::add_op_command(app);
  ehc::cli::add_check_command(app);
  ehc::cli::add_bench_command(app);
  ehc::cli::add_info_command(app);
  ehc::cli::add_tokmap_command(app);
  ehc::cli::add_layout_command(app);
  ehc::cli::add_pipeline_command(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::Success& e) {
    return app.exit(e);
  } catch (const CLI::ParseError& e) {
    print_error(e.what());
    return ehc::cli::kUsage;
  } catch (const ehc::cli::Exit& e) {
    return e.code;
  } catch (const ehc::cli::UsageError& e) {
    print_error(e.what());
    return ehc::cli::kUsage;
  } catch (const ehc::Error& e) {
    print_error(e.what());
    return exit_code(e.kind());
  } catch (const std::bad_alloc&) {
    print_error("memory: the tensors of this call do not fit");
    return ehc::cli::kUnavailable;
  } catch (const std::exception& e) {
    print_error(e.what());
    return ehc::cli::kUnavailable;
  }
  return ehc::cli::kDone;
}
