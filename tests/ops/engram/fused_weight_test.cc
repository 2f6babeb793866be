#include "ehc/engram/fused_weight.h"

#include "tests/ops/engram/support.h"

namespace ehc::engram {
namespace {

using test::Array;
using test::context_for;
using test::error_of;
using test::implementations;

// One rounding of the exact product: the same bits from every kernel, for every pair of types, any
// width, stride, alignment and number of threads.
TEST(FusedWeight, EveryKernelGivesTheSameBits) {
  uint32_t seed = 1;
  for (const int64_t streams : {1, 3, 4, 8}) {
    for (const int64_t width : {1, 2, 31, 32, 33, 64, 257, 9000}) {
      for (const DType hidden_type : {DType::f32, DType::bf16}) {
        for (const DType embed_type : {DType::f32, DType::bf16}) {
          Array hidden = Array::random(hidden_type, {streams, width}, ++seed);
          Array embed = Array::random(embed_type, {streams, width}, ++seed);
          hidden.set(0, 0x1p-100F);
          embed.set(0, 0x1.8p-40F);  // a subnormal product
          Array expected(DType::f32, {streams, width});
          for (int64_t i = 0; i < expected.size(); ++i) {
            expected.set(i, static_cast<float>(double{hidden.get(i)} * double{embed.get(i)}));
          }
          for (const std::string& impl : implementations("engram.fused_weight")) {
            for (const test::Layout layout : {test::Layout{0, 0}, test::Layout{7, 1}}) {
              Array fused(DType::f32, {streams, width}, layout);
              Context context = context_for(impl, 3);
              fused_weight(context, {.weight_hidden = hidden.copy(layout),
                                     .weight_embed = embed.copy(layout),
                                     .weight_fused = fused});
              EXPECT_EQ(fused.bits(), expected.bits())
                  << impl << " " << name_of(hidden_type) << " " << name_of(embed_type) << " "
                  << streams << "x" << width;
            }
          }
        }
      }
    }
  }
}

TEST(FusedWeight, RefusesOtherShapesAndSharedMemory) {
  const Array hidden = Array::random(DType::f32, {4, 8}, 1);
  const Array embed = Array::random(DType::f32, {4, 9}, 2);
  Array fused(DType::f32, {4, 8});
  Context context = Context::cpu(1);
  EXPECT_EQ(error_of([&] {
              fused_weight(context,
                           {.weight_hidden = hidden, .weight_embed = embed, .weight_fused = fused});
            }),
            "engram.fused_weight: tensor 'weight_embed': expected F32/BF16[4,8], got F32[4,9]");
  EXPECT_EQ(error_of([&] {
              fused_weight(context,
                           {.weight_hidden = hidden, .weight_embed = fused, .weight_fused = fused});
            }),
            "engram.fused_weight: tensor 'weight_fused': expected memory apart from "
            "'weight_embed', got overlapping memory");
}

}  // namespace
}  // namespace ehc::engram
