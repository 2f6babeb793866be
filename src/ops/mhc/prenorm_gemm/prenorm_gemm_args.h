// Arguments of the projection's kernels, and how the columns are cut.
#pragma once

#include "backends/cpu/kernel.h"
#include "core/host_device.h"
#include "ops/mhc/shared/group_rows.h"
#include "ops/mhc/shared/stream_rows.h"

namespace ehc::mhc {

struct PrenormGemmArgs {
  StreamSizes sizes;
  StreamRows residual;    // A[T,n,d]
  MixRows fn;             // F32[M,K]
  int64_t mixes = 0;      // M
  int64_t groups = 1;     // G
  int64_t splits = 1;     // S
  bool automatic = true;  // S follows from T and K; else it was asked for
  bool tf32 = false;      // fn is rounded
  GroupRows mul_partial, sqr_partial;
};

// Columns [begin, end).
struct Columns {
  int64_t begin = 0, end = 0;
};

// Columns that are summed in one go; sums of chunks are added pairwise.
inline constexpr int64_t kChunkColumns = 512;

EHC_HD int64_t chunks_of_columns(int64_t columns) {
  return (columns + kChunkColumns - 1) / kChunkColumns;
}

// The least power of two >= count.
EHC_HD int64_t power_of_two_from(int64_t count) {
  int64_t power = 1;
  while (power < count) power *= 2;
  return power;
}

// So many splits that a device of about 128 processors has work, each with at least a chunk.
EHC_HD int64_t automatic_splits(int64_t tokens, int64_t columns) {
  constexpr int64_t kTokens = 64, kProcessors = 128;
  const int64_t tiles = (tokens + kTokens - 1) / kTokens;
  const int64_t wanted = kProcessors / (tiles > 0 ? tiles : 1);
  const int64_t chunks = power_of_two_from(chunks_of_columns(columns));
  int64_t splits = 1;
  while (splits * 2 <= wanted && splits < chunks) splits *= 2;
  return splits;
}

// The columns of a split.
EHC_HD Columns columns_of_split(const PrenormGemmArgs& a, int64_t split) {
  const int64_t columns = a.sizes.streams * a.sizes.hidden;
  const auto within = [&](int64_t column) { return column < columns ? column : columns; };
  if (a.automatic) {
    const int64_t leaves = power_of_two_from(chunks_of_columns(columns));
    const int64_t width = (leaves > a.splits ? leaves / a.splits : 1) * kChunkColumns;
    return {within(split * width), within((split + 1) * width)};
  }
  constexpr int64_t kBlock = 64;
  const int64_t blocks = (columns + kBlock - 1) / kBlock;
  const int64_t each = blocks / a.splits, more = blocks % a.splits;
  const int64_t first = split * each + (split < more ? split : more);
  return {within(first * kBlock), within((first + each + (split < more ? 1 : 0)) * kBlock)};
}

// Tokens that one kernel call takes at most. No bit depends on how many it takes.
inline constexpr int64_t kPrenormTokens = 256;
// Tokens that it takes at a time.
inline constexpr int64_t kPrenormGroup = 32;

// The most levels of the tree over the chunks.
inline constexpr int kPrenormLevels = 40;

// The most mixes.
inline constexpr int64_t kPrenormMixes = 80;

// The most chunks that a group of tokens is multiplied with in turn, so that rows are read a page
// at a time; fewer where the second-level cache would not hold fn of them.
inline constexpr int kChunksTogether = 4;
EHC_HD int chunks_together(int64_t mixes) {
  const int64_t fit = 96 / mixes;
  return static_cast<int>(fit < 1 ? 1 : fit > kChunksTogether ? kChunksTogether : fit);
}

// Mixes of which the AMX kernel makes tiles of three bf16 parts.
inline constexpr int64_t kPartMixes = 8;

// Scratch of one kernel call, in floats: the chunks of fn that go together, a chunk of the streams
// of a group where they do not lie side by side, the widened or turned columns of a group and the
// products of its tiles, and for each group the sums of a chunk and of every level of the tree.
struct PrenormScratch {
  int64_t pitch = 0;   // from the sums of a token to those of the next: M, then the squares
  int64_t levels = 1;  // of the tree
  int64_t fn = 0, rows = 0, widened = 0, sums = 0, total = 0;
};

// For calls of at most `tokens` tokens.
EHC_HD PrenormScratch prenorm_scratch(const PrenormGemmArgs& a, int64_t tokens) {
  PrenormScratch s;
  const int64_t groups = (tokens + kPrenormGroup - 1) / kPrenormGroup;
  while (chunks_of_columns(a.sizes.streams * a.sizes.hidden) >> s.levels != 0) ++s.levels;
  s.pitch = (a.mixes + 4) / 4 * 4;
  s.fn = (a.mixes + kPartMixes - 1) / kPartMixes * kPartMixes * kChunkColumns * 3 / 2 *
         chunks_together(a.mixes);
  s.rows = kPrenormGroup * kChunkColumns;
  s.widened = kPrenormGroup * kChunkColumns;
  s.sums = kPrenormGroup * s.pitch;
  s.total = s.fn + s.rows + s.widened + s.sums * groups * (s.levels + 1);
  return s;
}

// Split `split` of tokens [begin, end), at most kPrenormTokens.
EHC_CPU_KERNEL(void prenorm_gemm_block(const PrenormGemmArgs& args, int64_t split, int64_t begin,
                                       int64_t end, float* scratch));
// BF16 alone.
namespace amx {
void prenorm_gemm_block(const PrenormGemmArgs& args, int64_t split, int64_t begin, int64_t end,
                        float* scratch);
}

// The same in plain loops, in double and in float; without scratch.
template <class Real>
void prenorm_gemm_reference(const PrenormGemmArgs& args, int64_t split, int64_t begin, int64_t end,
                            float* scratch);

}  // namespace ehc::mhc
