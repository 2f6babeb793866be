#include "cli/fma_rate.h"

#include <algorithm>
#include <chrono>

#include "backends/cpu/isa.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ehc::cli {

namespace {

constexpr int64_t kRounds = 1000000;
constexpr int kRepeats = 5;
constexpr int kSums = 12;  // independent chains: more than latency times units

// Rounds of kSums fused multiply-adds on `lanes` floats each.
struct Kernel {
  void (*run)(float* lane, int64_t rounds);
  int64_t lanes;
};

void run_plain(float* lane, int64_t rounds) {
  constexpr int kLanes = 4;
  float sums[kSums][kLanes];
  for (auto& sum : sums) {
    for (int k = 0; k < kLanes; ++k) sum[k] = lane[k];
  }
  for (int64_t i = 0; i < rounds; ++i) {
    for (auto& sum : sums) {
      for (int k = 0; k < kLanes; ++k) sum[k] = sum[k] * lane[k] + lane[k];
    }
  }
  for (const auto& sum : sums) {
    for (int k = 0; k < kLanes; ++k) lane[k] += sum[k];
  }
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void run_avx2(float* lane, int64_t rounds) {
  const __m256 x = _mm256_loadu_ps(lane);
  __m256 sums[kSums];
  for (__m256& sum : sums) sum = x;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m256& sum : sums) sum = _mm256_fmadd_ps(sum, x, x);
  }
  __m256 total = x;
  for (const __m256& sum : sums) total = _mm256_add_ps(total, sum);
  _mm256_storeu_ps(lane, total);
}

__attribute__((target("avx512f"))) void run_avx512(float* lane, int64_t rounds) {
  const __m512 x = _mm512_loadu_ps(lane);
  __m512 sums[kSums];
  for (__m512& sum : sums) sum = x;
  for (int64_t i = 0; i < rounds; ++i) {
#pragma GCC unroll 12
    for (__m512& sum : sums) sum = _mm512_fmadd_ps(sum, x, x);
  }
  __m512 total = x;
  for (const __m512& sum : sums) total = _mm512_add_ps(total, sum);
  _mm512_storeu_ps(lane, total);
}
#endif

Kernel best_kernel() {
#if defined(__x86_64__)
  if (cpu_supports(Isa::avx512)) return {&run_avx512, 16};
  if (cpu_supports(Isa::avx2)) return {&run_avx2, 8};
#endif
  return {&run_plain, 4};
}

}  // namespace

double FmaRate::measure() {
  if (context_.device() != Device::cpu) return 0;
  const Kernel kernel = best_kernel();
  const int threads = context_.executor().concurrency();
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    context_.executor().run(threads, [&](int64_t) {
      float lane[16] = {0.5F, 0.25F, 0.125F, 0.75F};
      kernel.run(lane, kRounds);
      volatile float kept = lane[0];  // the work has a result
      static_cast<void>(kept);
    });
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    const auto operations = static_cast<double>(2 * kSums * kernel.lanes * kRounds * threads);
    best_ = std::max(best_, operations / taken.count());
  }
  return best_;
}

}  // namespace ehc::cli
