#include "cli/progress.h"

#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>

namespace ehc::cli {

Progress::Progress(std::string what, size_t total)
    : what_(std::move(what)), total_(std::max<size_t>(1, total)), is_terminal_(isatty(2) == 1) {}

void Progress::show(size_t done, const std::string& label) {
  using namespace std::chrono_literals;
  const auto now = std::chrono::steady_clock::now();
  if (!is_terminal_ || now - start_ < 1s || now - last_ < 100ms) return;
  last_ = now;
  is_shown_ = true;
  constexpr size_t kWidth = 30;
  const size_t filled = std::min(kWidth, done * kWidth / total_);
  fmt::print(stderr, "\r{} [{:=<{}}{: <{}}] {}/{} {:.40}\x1b[K", what_, "", filled, "",
             kWidth - filled, done, total_, label);
  std::fflush(stderr);
}

void Progress::clear() {
  if (is_shown_) fmt::print(stderr, "\r\x1b[K");
  is_shown_ = false;
}

}  // namespace ehc::cli
