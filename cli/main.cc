// ehc: run, check and time operators, and make what they read (token maps, table layouts).
#include <fcntl.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <csignal>
#include <cstdio>
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

// Errors are one line, whatever was quoted in them. Where they cannot be written, the exit code has
// to do: never throws.
void print_error(std::string text) {
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; }, ' ');
  std::fputs(("ehc: " + text + "\n").c_str(), stderr);
}

// A standard stream that the caller closed must not become one of our files. Opened the wrong way
// round, so that writing there still fails.
void reserve_standard_streams() {
  for (int fd = STDIN_FILENO; fd <= STDERR_FILENO; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) ::open("/dev/null", fd == STDIN_FILENO ? O_WRONLY : O_RDONLY);
  }
}

int run(int argc, char** argv) {
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
  ehc::cli::add_streams_command(app);
  ehc::cli::add_train_command(app);
  ehc::cli::add_advise_command(app);
  ehc::cli::add_gain_command(app);
  ehc::cli::add_plan_command(app);
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
    const bool cannot_print = std::ferror(stdout) != 0;
    print_error(cannot_print ? "standard output: cannot write" : e.what());
    return cannot_print ? ehc::cli::kFile : ehc::cli::kUnavailable;
  }
  return ehc::cli::kDone;
}

}  // namespace

int main(int argc, char** argv) {
  reserve_standard_streams();
  // A file size limit is then an error of the write, which takes its temporary file away.
  std::signal(SIGXFSZ, SIG_IGN);
  const int code = run(argc, argv);
  if (code == ehc::cli::kDone && (std::fflush(stdout) != 0 || std::ferror(stdout) != 0)) {
    print_error("standard output: cannot write");
    return ehc::cli::kFile;
  }
  return code;
}
