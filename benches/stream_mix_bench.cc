// How fast memory moves in other mixes than a copy's: reads r streams and writes w, a cache line of
// each in turn, with no arithmetic but an exclusive or. What an operator with that mix could reach
// at most, as a share of the copy rate of the same run.
//
// usage: stream_mix_bench [threads]
#include <fmt/core.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <vector>

#include "backends/cpu/isa.h"
#include "cli/copy_rate.h"
#include "core/parallel.h"
#include "ehc/memory.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

using ehc::Context;

struct Mix {
  const char* operators;
  int reads, writes;
};

constexpr Mix kMixes[] = {
    {"copy, conv_fwd", 1, 1},        {"gate_fwd, layer_fwd (n = 4)", 9, 4},
    {"gate_bwd (n = 4)", 13, 9},     {"conv_bwd", 2, 1},
    {"expand (n = 4)", 1, 4},        {"post_fwd (n = 4)", 5, 4},
    {"pre_apply_fwd (n = 4)", 4, 1}, {"reading alone", 8, 0},
};
constexpr int kRowWords = 1024;  // 8 KiB
constexpr size_t kTotalBytes = size_t{2} << 30;
constexpr int kRepeats = 15;

using Word = uint64_t;

// A cache line: what is moved at a time.
#if defined(__x86_64__)
using Line = __m512i;
#define EHC_LINES __attribute__((target("avx512f")))
EHC_LINES inline void store_past_caches(Word* to, Line line) {
  _mm512_stream_si512(reinterpret_cast<Line*>(to), line);
}
#else
typedef Word Line __attribute__((vector_size(64), may_alias));
#define EHC_LINES
inline void store_past_caches(Word* to, Line line) { *reinterpret_cast<Line*>(to) = line; }
#endif

// Rows [begin, end) of every stream.
EHC_LINES Word move_rows(const Mix& mix, Word* memory, int64_t rows, int64_t begin, int64_t end) {
  constexpr int kLineWords = sizeof(Line) / sizeof(Word);
  const int64_t stride = rows * kRowWords;
  Line used = {};
  for (int64_t i = begin * kRowWords; i < end * kRowWords; i += kLineWords) {
    const Word* from = memory + i;
    Line sum = {};
    for (int r = 0; r < mix.reads; ++r, from += stride) sum ^= *reinterpret_cast<const Line*>(from);
    used ^= sum;
    Word* to = memory + mix.reads * stride + i;
    for (int w = 0; w < mix.writes; ++w, to += stride) store_past_caches(to, sum);
  }
  return static_cast<Word>(used[0]);
}

double bytes_per_second(Context& context, const Mix& mix, Word* memory) {
  const int streams = mix.reads + mix.writes;
  const auto rows = static_cast<int64_t>(kTotalBytes / sizeof(Word)) / kRowWords / streams;
  double best = 0;
  for (int repeat = 0; repeat < kRepeats; ++repeat) {
    const auto start = std::chrono::steady_clock::now();
    ehc::parallel_for(context, rows, 64, [&](int64_t begin, int64_t end) {
      volatile Word used = move_rows(mix, memory, rows, begin, end);
      static_cast<void>(used);
    });
    const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
    best = std::max(best,
                    static_cast<double>(rows * streams * kRowWords) * sizeof(Word) / taken.count());
  }
  return best;
}

}  // namespace

int main(int argc, char** argv) {
  const int threads = argc > 1 ? std::atoi(argv[1]) : 2;
#if defined(__x86_64__)
  if (!ehc::cpu_supports(ehc::Isa::avx512)) {
    fmt::print(
        stderr,
        "stream_mix_bench: expected a processor with AVX-512, for its stores past the caches\n");
    return 1;
  }
#endif
  Context context = Context::cpu(threads);
  ehc::Buffer memory(context, kTotalBytes);
  std::memset(memory.data(), 1, memory.bytes());  // its pages exist
  ehc::cli::CopyRate copy(context);
  copy.measure();
  std::vector<double> rates;
  for (const Mix& mix : kMixes)
    rates.push_back(bytes_per_second(context, mix, static_cast<Word*>(memory.data())));
  const double ceiling = copy.measure();
  fmt::print("copy: {:.1f} GB/s read and written ({}, {} threads)\n", ceiling / 1e9,
             copy.best_way(), threads);
  for (size_t i = 0; i < rates.size(); ++i) {
    fmt::print("{:2} read, {} written  {:5.1f} GB/s  {:.2f} of copy  {}\n", kMixes[i].reads,
               kMixes[i].writes, rates[i] / 1e9, rates[i] / ceiling, kMixes[i].operators);
  }
}
