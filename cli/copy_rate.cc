#include "cli/copy_rate.h"

#include <algorithm>
#include <chrono>
#include <cstring>

#include "backends/cpu/isa.h"
#include "core/cuda_timing.h"
#include "core/parallel.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace ehc::cli {

namespace {

constexpr size_t kBytes = size_t{1} << 29;
constexpr int64_t kBlock = 4096;  // pieces of threads begin at whole blocks
constexpr int kRepeats = 3;

using Copy = void (*)(std::byte* to, const std::byte* from, int64_t bytes);

void copy_plain(std::byte* to, const std::byte* from, int64_t bytes) {
  std::memcpy(to, from, static_cast<size_t>(bytes));
}

#if defined(__x86_64__)
// Stores that go past the caches save the read of the line that they replace.
void copy_streaming_sse2(std::byte* to, const std::byte* from, int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 64) {
    for (int64_t k = i; k < i + 64; k += 16) {
      _mm_stream_si128(reinterpret_cast<__m128i*>(to + k),
                       _mm_loadu_si128(reinterpret_cast<const __m128i*>(from + k)));
    }
  }
  _mm_sfence();
}

__attribute__((target("avx512f"))) void copy_streaming_avx512(std::byte* to, const std::byte* from,
                                                              int64_t bytes) {
  for (int64_t i = 0; i < bytes; i += 128) {
    const __m512i a = _mm512_loadu_si512(from + i);
    const __m512i b = _mm512_loadu_si512(from + i + 64);
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 2048), _MM_HINT_T0);
    _mm_prefetch(reinterpret_cast<const char*>(from + i + 2112), _MM_HINT_T0);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), a);
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i + 64), b);
  }
  _mm_sfence();
}
#endif

double seconds_of(Context& context, Copy copy, std::byte* to, const std::byte* from) {
  const auto start = std::chrono::steady_clock::now();
  parallel_for(context, static_cast<int64_t>(kBytes) / kBlock, 1, [&](int64_t begin, int64_t end) {
    copy(to + begin * kBlock, from + begin * kBlock, (end - begin) * kBlock);
  });
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace

double CopyRate::measure() {
  const auto keep = [&](double seconds, const char* way) {
    const double rate = 2.0 * static_cast<double>(kBytes) / seconds;
    if (rate <= best_) return;
    best_ = rate;
    best_way_ = way;
  };
  if (context_.device() == Device::cuda) {
    const cuda_timing::Rates rates = cuda_timing::measure_rates(context_.device_index());
    keep(2.0 * static_cast<double>(kBytes) / rates.copy, rates.copy_way);
    read_ = std::max(read_, rates.read);
    one_to_four_ = std::max(one_to_four_, rates.one_to_four);
    return best_;
  }
  if (from_.bytes() == 0) {
    from_ = Buffer(context_, kBytes);
    to_ = Buffer(context_, kBytes);
    std::memset(from_.data(), 1, kBytes);  // so that no page is the shared zero page
    std::memset(to_.data(), 2, kBytes);
  }
  auto* to = static_cast<std::byte*>(to_.data());
  const auto* from = static_cast<const std::byte*>(from_.data());
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    keep(seconds_of(context_, &copy_plain, to, from), "memcpy");
#if defined(__x86_64__)
    keep(seconds_of(context_, &copy_streaming_sse2, to, from), "streaming SSE2");
    if (cpu_supports(Isa::avx512)) {
      keep(seconds_of(context_, &copy_streaming_avx512, to, from), "streaming AVX-512");
    }
#endif
  }
  return best_;
}

}  // namespace ehc::cli
