// engram.gather_bwd beside the same sum without determinism: zeros, then every thread adds its
// tokens' rows to the table as they come, under a lock per row. Prints both times and their ratio.
//
// usage: gather_bwd_bench [threads [tokens [columns [hd [rows]]]]]
#include <fmt/core.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include "cli/case_random.h"
#include "core/float_formats.h"
#include "core/parallel.h"
#include "ehc/engram/gather_bwd.h"
#include "ehc/memory.h"

namespace {

using ehc::Context;

struct Sizes {
  int threads = 2;
  int64_t tokens = 131072, columns = 16, width = 64, rows = 4000000;
};

#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void add_row(float* to, const uint16_t* from, int64_t width) {
  for (int64_t i = 0; i < width; ++i) {
    const uint32_t bits = static_cast<uint32_t>(from[i]) << 16;
    float x = 0;
    std::memcpy(&x, &bits, sizeof x);
    to[i] += x;
  }
}

class Locks {
 public:
  void lock(int64_t row) {
    while (at(row).exchange(true, std::memory_order_acquire)) {
    }
  }
  void unlock(int64_t row) { at(row).store(false, std::memory_order_release); }

 private:
  std::atomic<bool>& at(int64_t row) { return locks_[static_cast<size_t>(row % kCount)]; }
  static constexpr int64_t kCount = 1 << 16;
  std::vector<std::atomic<bool>> locks_ = std::vector<std::atomic<bool>>(kCount);
};

void add_unordered(Context& context, const Sizes& s, const uint16_t* grad, const int32_t* indices,
                   float* table, Locks& locks) {
  constexpr int64_t kAhead = 16;
  ehc::parallel_for(context, s.rows, 1024, [&](int64_t begin, int64_t end) {
    std::memset(table + begin * s.width, 0,
                static_cast<size_t>((end - begin) * s.width) * sizeof(float));
  });
  ehc::parallel_for(context, s.tokens * s.columns, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      if (i + kAhead < end && indices[i + kAhead] >= 0) {
        const float* next = table + indices[i + kAhead] * s.width;
        for (int64_t k = 0; k < s.width; k += 16) __builtin_prefetch(next + k, 1);
      }
      const int64_t row = indices[i];
      if (row < 0) continue;
      locks.lock(row);
      add_row(table + row * s.width, grad + i * s.width, s.width);
      locks.unlock(row);
    }
  });
}

// Best of some runs, in milliseconds.
double best_of(int runs, const std::function<void()>& body) {
  double best = 1e30;
  for (int i = 0; i < runs; ++i) {
    const auto start = std::chrono::steady_clock::now();
    body();
    const std::chrono::duration<double, std::milli> taken =
        std::chrono::steady_clock::now() - start;
    best = std::min(best, taken.count());
  }
  return best;
}

void compare(const Sizes& s) {
  constexpr int kRuns = 7;
  Context context = Context::cpu(s.threads);
  const int64_t count = s.tokens * s.columns;
  std::vector<uint16_t> grad(static_cast<size_t>(count * s.width));
  std::vector<int32_t> indices(static_cast<size_t>(count));
  ehc::parallel_for(context, count, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      indices[static_cast<size_t>(i)] =
          static_cast<int32_t>(ehc::cli::random_integer(1, i, 0, s.rows - 1));
      for (int64_t k = i * s.width; k < (i + 1) * s.width; ++k) {
        grad[static_cast<size_t>(k)] =
            ehc::float_to_bf16(ehc::cli::random_normal(ehc::cli::random_bits(2, k)));
      }
    }
  });
  std::vector<float> table(static_cast<size_t>(s.rows * s.width));
  Locks locks;
  const double unordered = best_of(
      kRuns, [&] { add_unordered(context, s, grad.data(), indices.data(), table.data(), locks); });

  const auto report = [&](const char* form, const ehc::engram::GatherBackward& params) {
    const ehc::Buffer workspace(context, workspace_bytes(context, params));
    context.set_workspace(workspace.data(), workspace.bytes());
    const double ordered = best_of(kRuns, [&] { gather_bwd(context, params); });
    fmt::print("{:<22} {:8.1f} ms   unordered {:8.1f} ms   rate {:5.2f} of unordered\n", form,
               ordered, unordered, unordered / ordered);
  };
  ehc::engram::GatherBackward params;
  params.grad_embedding = {grad.data(), ehc::DType::bf16, {s.tokens, s.columns * s.width}};
  params.indices = {indices.data(), ehc::DType::i32, {s.tokens, s.columns}};
  params.rows = s.rows;
  params.grad_table = {table.data(), ehc::DType::f32, {s.rows, s.width}};
  report("dense", params);

  params.grad_table = {};
  std::vector<int32_t> unique(indices.size());
  std::vector<float> sums(grad.size());
  params.unique_rows = {unique.data(), ehc::DType::i32, {count}};
  params.grad_rows = {sums.data(), ehc::DType::f32, {count, s.width}};
  report("sparse", params);
}

}  // namespace

int main(int argc, char** argv) {
  Sizes s;
  const auto argument = [&](int index, auto& value) {
    if (argc <= index) return;
    value = static_cast<std::remove_reference_t<decltype(value)>>(std::atoll(argv[index]));
    if (value > 0) return;
    fmt::print(stderr, "usage: gather_bwd_bench [threads [tokens [columns [hd [rows]]]]]\n");
    std::exit(2);
  };
  argument(1, s.threads);
  argument(2, s.tokens);
  argument(3, s.columns);
  argument(4, s.width);
  argument(5, s.rows);
  fmt::print("T={} C={} hd={} rows={} bf16, {} threads\n", s.tokens, s.columns, s.width, s.rows,
             s.threads);
  compare(s);
  return 0;
}
