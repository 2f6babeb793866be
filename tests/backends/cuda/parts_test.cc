// Class E between operators: what a fused operator gives has the bits of its parts, on the CPU and
// on a device.
#include "tests/backends/cuda/device_support.h"

namespace ehc {
namespace {

using test::calls_with;
using test::NamedCalls;
using test::Words;

class Parts : public test::OnEachDevice {
 protected:
  // The test's operators must all run there.
  bool available(std::initializer_list<const char*> names) {
    for (const char* name : names) {
      if (!test::runs_on(*find_operator(name), GetParam())) return false;
    }
    return true;
  }
};

#define EHC_NEEDS(...)                                \
  if (GetParam() == Device::cuda) EHC_NEEDS_DEVICE(); \
  if (!available({__VA_ARGS__})) GTEST_SKIP() << "not on this device"

cli::CaseInputs inputs_of(const std::string& line) {
  const cli::CaseLine parsed = cli::parse_cases(line, "test").front();
  return {*find_operator(parsed.op), parsed};
}

// Tensor `fused.NAME` against NAME.
void expect_same(const NamedCalls& calls, const std::vector<std::string>& names,
                 const std::string& what) {
  for (const std::string& name : names) {
    EXPECT_TRUE(calls.bits("fused." + name) == calls.bits(name)) << what << ": " << name;
  }
}

Words fused(std::initializer_list<const char*> names) {
  Words words;
  for (const char* name : names) words.emplace_back(name, "fused." + std::string(name));
  return words;
}

const Words kNorm = {{"norm_eps", "1e-6"}};
const Words kSplit = {{"pre_eps", "1e-6"}, {"post_mult", "2"}};
const Words kSinkhorn = {{"repeat", "20"}, {"eps", "1e-6"}};
const Words kRules = {{"norm_eps", "1e-6"},
                      {"pre_eps", "1e-6"},
                      {"post_mult", "2"},
                      {"repeat", "20"},
                      {"sinkhorn_eps", "1e-6"}};

Words operator+(Words a, const Words& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

// From `residual` and `fn`, with the merged norm weight, to mixes, mul and sqr.
void make_mixes(NamedCalls& calls, const std::string& residual, int64_t columns) {
  calls.call("mhc.merge_fwd", {}, {{"fn", "fn"}, {"norm_weight", "norm_weight"}}, {});
  calls.call("mhc.prenorm_gemm", {}, {{"residual", residual}, {"fn", "fn_merged"}}, {});
  calls.call("mhc.reduce_partials_fwd", kNorm + Words{{"k", std::to_string(columns)}},
             {{"mul_partial", "mul_partial"}, {"sqr_partial", "sqr_partial"}}, {});
}

void make_coefficients(NamedCalls& calls) {
  calls.call("mhc.split_fwd", kSplit, {{"mixes", "mixes"}, {"scale", "scale"}, {"base", "base"}},
             {{"post", "new_post"}});
  calls.call("mhc.sinkhorn_fwd", kSinkhorn, {{"comb_logits", "comb_logits"}},
             {{"comb", "new_comb"}});
}

struct Shape {
  int tokens, streams, width;
  const char* type;
  [[nodiscard]] std::string text() const {
    return " T=" + std::to_string(tokens) + " n=" + std::to_string(streams) +
           " d=" + std::to_string(width) + " A=" + type;
  }
};
constexpr Shape kShapes[] = {{33, 4, 1280, "BF16"}, {5, 2, 257, "F16"},   {9, 3, 96, "F32"},
                             {257, 4, 64, "BF16"},  {1, 4, 4096, "BF16"}, {2, 8, 1000, "BF16"}};

TEST_P(Parts, PreHasTheBitsOfItsOperators) {
  EHC_NEEDS("mhc.pre_fwd", "mhc.merge_fwd", "mhc.prenorm_gemm", "mhc.reduce_partials_fwd",
            "mhc.split_fwd", "mhc.sinkhorn_fwd", "mhc.pre_apply_fwd");
  for (const Shape& s : kShapes) {
    const cli::CaseInputs inputs = inputs_of(
        "mhc.pre_fwd with=norm_weight norm_eps=1e-6 pre_eps=1e-6 post_mult=2 repeat=20 "
        "sinkhorn_eps=1e-6" +
        s.text());
    NamedCalls calls = calls_with(context(), inputs);
    calls.call("mhc.pre_fwd", kRules + Words{{"save", "true"}},
               {{"residual", "residual"},
                {"fn", "fn"},
                {"scale", "scale"},
                {"base", "base"},
                {"norm_weight", "norm_weight"}},
               fused({"layer_input", "pre", "mixes", "mul", "sqr", "comb_logits"}) +
                   Words{{"post", "fused.new_post"}, {"comb", "fused.new_comb"}});
    make_mixes(calls, "residual", int64_t{s.streams} * s.width);
    make_coefficients(calls);
    calls.call("mhc.pre_apply_fwd", {}, {{"residual", "residual"}, {"pre", "pre"}}, {});
    expect_same(
        calls, {"layer_input", "pre", "mixes", "mul", "sqr", "comb_logits", "new_post", "new_comb"},
        s.text());
  }
}

TEST_P(Parts, PreBackwardInAChainHasTheBitsOfItsOperators) {
  EHC_NEEDS("mhc.pre_bwd", "mhc.pre_fwd", "mhc.merge_fwd", "mhc.pre_apply_bwd", "mhc.sinkhorn_bwd",
            "mhc.split_bwd", "mhc.split_bwd_reduce", "mhc.reduce_partials_bwd", "mhc.norm_fn_bwd",
            "mhc.merge_bwd");
  for (const Shape& s : kShapes) {
    const cli::CaseInputs inputs = inputs_of(
        "mhc.pre_bwd with=norm_weight,grad_layer_input,grad_post,grad_comb norm_eps=1e-6 "
        "pre_eps=1e-6 post_mult=2 repeat=20 sinkhorn_eps=1e-6" +
        s.text());
    NamedCalls calls = calls_with(context(), inputs);
    const Words parameters = {
        {"fn", "fn"}, {"scale", "scale"}, {"base", "base"}, {"norm_weight", "norm_weight"}};
    calls.call("mhc.pre_bwd", kRules + Words{{"rounding", "chain"}},
               parameters + Words{{"residual", "residual"},
                                  {"grad_layer_input", "grad_layer_input"},
                                  {"grad_post", "grad_post"},
                                  {"grad_comb", "grad_comb"}},
               fused({"grad_residual", "grad_fn", "grad_scale", "grad_base", "grad_norm_weight"}));
    calls.call("mhc.pre_fwd", kRules + Words{{"save", "true"}},
               parameters + Words{{"residual", "residual"}}, {});
    calls.call("mhc.merge_fwd", {}, {{"fn", "fn"}, {"norm_weight", "norm_weight"}}, {});
    calls.call("mhc.pre_apply_bwd", {},
               {{"grad_layer_input", "grad_layer_input"}, {"residual", "residual"}, {"pre", "pre"}},
               {{"grad_residual", "grad_of_collapse"}});
    calls.call("mhc.sinkhorn_bwd", kSinkhorn,
               {{"grad_comb", "grad_comb"}, {"comb_logits", "comb_logits"}}, {});
    calls.call("mhc.split_bwd", {{"post_mult", "2"}},
               {{"grad_pre", "grad_pre"},
                {"grad_post", "grad_post"},
                {"grad_comb_logits", "grad_comb_logits"},
                {"mixes", "mixes"},
                {"scale", "scale"},
                {"base", "base"}},
               {});
    calls.call(
        "mhc.split_bwd_reduce", {},
        {{"grad_scale_partial", "grad_scale_partial"}, {"grad_base_partial", "grad_base_partial"}},
        {});
    calls.call("mhc.reduce_partials_bwd",
               kNorm + Words{{"k", std::to_string(int64_t{s.streams} * s.width)}},
               {{"grad_mixes", "grad_mixes"}, {"mul", "mul"}, {"sqr", "sqr"}}, {});
    calls.call("mhc.norm_fn_bwd", {},
               {{"grad_mul", "grad_mul"},
                {"grad_sqr", "grad_sqr"},
                {"residual", "residual"},
                {"fn", "fn_merged"},
                {"grad_residual_acc", "grad_of_collapse"}},
               {{"grad_fn", "grad_fn_merged"}});
    calls.call("mhc.merge_bwd", {},
               {{"grad_fn_merged", "grad_fn_merged"}, {"fn", "fn"}, {"norm_weight", "norm_weight"}},
               {});
    expect_same(calls, {"grad_residual", "grad_fn", "grad_scale", "grad_base", "grad_norm_weight"},
                s.text());
  }
}

TEST_P(Parts, BigFuseHasTheBitsOfItsOperators) {
  EHC_NEEDS("mhc.pre_big_fuse", "mhc.reduce_partials_fwd", "mhc.split_fwd", "mhc.sinkhorn_fwd",
            "mhc.pre_apply_fwd");
  for (const Shape& s : kShapes) {
    for (const char* splits : {"1", "2", "7", "16"}) {
      const std::string line =
          "mhc.pre_big_fuse norm_eps=1e-6 pre_eps=1e-6 post_mult=2 repeat=20 "
          "sinkhorn_eps=1e-6 S=" +
          std::string(splits) + s.text();
      const cli::CaseInputs inputs = inputs_of(line);
      NamedCalls calls = calls_with(context(), inputs);
      calls.call(
          "mhc.pre_big_fuse", kRules,
          {{"mul_partial", "mul_partial"},
           {"sqr_partial", "sqr_partial"},
           {"scale", "scale"},
           {"base", "base"},
           {"residual", "residual"}},
          fused({"layer_input"}) + Words{{"post", "fused.new_post"}, {"comb", "fused.new_comb"}});
      calls.call("mhc.reduce_partials_fwd",
                 kNorm + Words{{"k", std::to_string(int64_t{s.streams} * s.width)}},
                 {{"mul_partial", "mul_partial"}, {"sqr_partial", "sqr_partial"}}, {});
      make_coefficients(calls);
      calls.call("mhc.pre_apply_fwd", {}, {{"residual", "residual"}, {"pre", "pre"}}, {});
      expect_same(calls, {"layer_input", "new_post", "new_comb"}, line);
    }
  }
}

TEST_P(Parts, HeadHasTheBitsOfItsOperators) {
  EHC_NEEDS("mhc.head_fwd", "mhc.merge_fwd", "mhc.prenorm_gemm", "mhc.reduce_partials_fwd",
            "mhc.head_mix_fwd", "mhc.pre_apply_fwd");
  for (const Shape& s : kShapes) {
    const cli::CaseInputs inputs =
        inputs_of("mhc.head_fwd with=norm_weight norm_eps=1e-6 pre_eps=1e-6" + s.text());
    NamedCalls calls = calls_with(context(), inputs);
    calls.call("mhc.head_fwd", kNorm + Words{{"pre_eps", "1e-6"}},
               {{"residual", "residual"},
                {"fn", "fn"},
                {"scale", "scale"},
                {"base", "base"},
                {"norm_weight", "norm_weight"}},
               {{"hidden", "fused.layer_input"}});
    make_mixes(calls, "residual", int64_t{s.streams} * s.width);
    calls.call("mhc.head_mix_fwd", {{"pre_eps", "1e-6"}},
               {{"mixes", "mixes"}, {"scale", "scale"}, {"base", "base"}}, {});
    calls.call("mhc.pre_apply_fwd", {}, {{"residual", "residual"}, {"pre", "pre"}}, {});
    expect_same(calls, {"layer_input"}, s.text());
  }
}

TEST_P(Parts, SeamsHaveTheBitsOfPostAndPre) {
  EHC_NEEDS("mhc.seam_classic_fwd", "mhc.seam_single_pass_fwd", "mhc.post_fwd", "mhc.pre_fwd",
            "mhc.pre_apply_fwd");
  for (const Shape& s : kShapes) {
    for (const bool single_pass : {false, true}) {
      const std::string op = single_pass ? "mhc.seam_single_pass_fwd" : "mhc.seam_classic_fwd";
      const cli::CaseInputs inputs =
          inputs_of(op +
                    " with=norm_weight norm_eps=1e-6 pre_eps=1e-6 post_mult=2 repeat=20 "
                    "sinkhorn_eps=1e-6" +
                    s.text());
      NamedCalls calls = calls_with(context(), inputs);
      Words names = {{"layer_output", "layer_output"},
                     {"residual", "residual"},
                     {"post", "post"},
                     {"comb", "comb"},
                     {"fn", "fn"},
                     {"scale", "scale"},
                     {"base", "base"},
                     {"norm_weight", "norm_weight"}};
      if (single_pass) names.emplace_back("pre", "pre");
      calls.call(op, kRules + Words{{"save", "true"}}, names,
                 fused({"new_residual", "layer_input", "next_pre", "next_post", "next_comb",
                        "next_mixes", "next_mul", "next_sqr", "next_comb_logits"}));
      calls.call("mhc.post_fwd", {},
                 {{"layer_output", "layer_output"},
                  {"residual", "residual"},
                  {"post", "post"},
                  {"comb", "comb"}},
                 {});
      calls.call("mhc.pre_fwd", kRules + Words{{"save", "true"}},
                 {{"residual", "new_residual"},
                  {"fn", "fn"},
                  {"scale", "scale"},
                  {"base", "base"},
                  {"norm_weight", "norm_weight"}},
                 {{"pre", "next_pre"},
                  {"post", "next_post"},
                  {"comb", "next_comb"},
                  {"mixes", "next_mixes"},
                  {"mul", "next_mul"},
                  {"sqr", "next_sqr"},
                  {"comb_logits", "next_comb_logits"}});
      if (single_pass) {
        calls.call("mhc.pre_apply_fwd", {}, {{"residual", "new_residual"}, {"pre", "pre"}}, {});
      }
      expect_same(calls,
                  {"new_residual", "layer_input", "next_pre", "next_post", "next_comb",
                   "next_mixes", "next_mul", "next_sqr", "next_comb_logits"},
                  op + s.text());
    }
  }
}

TEST_P(Parts, RecomputeHasTheBitsOfApplyAndPost) {
  EHC_NEEDS("mhc.multilayer_recompute", "mhc.pre_apply_fwd", "mhc.post_fwd");
  constexpr int kLayers = 3;
  for (const Shape& s : kShapes) {
    const cli::CaseInputs inputs =
        inputs_of("mhc.multilayer_recompute L=3 Lp=3 with=layer_output.L" + s.text());
    NamedCalls calls = calls_with(context(), inputs);
    Words names = {{"residual", "residual"}};
    Words results;
    for (int l = 0; l < kLayers; ++l) {
      const std::string layer = std::to_string(l);
      for (const char* input : {"pre.", "layer_output.", "post.", "comb."}) {
        names.emplace_back(input + layer, input + layer);
      }
      for (const char* output : {"layer_input.", "new_residual."}) {
        results.emplace_back(output + layer, "fused." + (output + layer));
      }
    }
    calls.call("mhc.multilayer_recompute", {}, names, results);
    std::string residual = "residual";
    for (int l = 0; l < kLayers; ++l) {
      const std::string layer = std::to_string(l);
      calls.call("mhc.pre_apply_fwd", {}, {{"residual", residual}, {"pre", "pre." + layer}},
                 {{"layer_input", "layer_input." + layer}});
      calls.call("mhc.post_fwd", {},
                 {{"layer_output", "layer_output." + layer},
                  {"residual", residual},
                  {"post", "post." + layer},
                  {"comb", "comb." + layer}},
                 {{"new_residual", "new_residual." + layer}});
      residual = "new_residual." + layer;
      expect_same(calls, {"layer_input." + layer, "new_residual." + layer}, s.text());
    }
  }
}

TEST_P(Parts, GateHasTheSameBitsSavedOrNot) {
  EHC_NEEDS("engram.gate_fwd");
  for (const Shape& s : kShapes) {
    const cli::CaseInputs inputs = inputs_of("engram.gate_fwd eps=1e-6 clamp=1e-6" + s.text());
    Context on = context();
    NamedCalls calls = calls_with(on, inputs);
    const Words rules = {{"eps", "1e-6"}, {"clamp", "1e-6"}};
    const Words names = {{"residual", "residual"}, {"kv", "kv"}, {"weight_fused", "weight_fused"}};
    calls.call("engram.gate_fwd", rules + Words{{"save", "true"}}, names, fused({"out"}));
    calls.call("engram.gate_fwd", rules, names, {});
    expect_same(calls, {"out"}, s.text());
  }
}

TEST_P(Parts, LayerWithoutConvolutionHasTheBitsOfTheGate) {
  EHC_NEEDS("engram.layer_fwd", "engram.gate_fwd", "engram.fused_weight");
  for (const Shape& s : kShapes) {
    const cli::CaseInputs inputs = inputs_of("engram.layer_fwd eps=1e-6 clamp=1e-6" + s.text());
    NamedCalls calls = calls_with(context(), inputs);
    const Words rules = {{"eps", "1e-6"}, {"clamp", "1e-6"}, {"save", "true"}};
    calls.call("engram.layer_fwd", rules,
               {{"residual", "residual"},
                {"kv", "kv"},
                {"weight_hidden", "weight_hidden"},
                {"weight_embed", "weight_embed"}},
               fused({"out", "dot", "alpha", "rstd_residual", "rstd_key"}));
    calls.call("engram.fused_weight", {},
               {{"weight_hidden", "weight_hidden"}, {"weight_embed", "weight_embed"}}, {});
    calls.call("engram.gate_fwd", rules,
               {{"residual", "residual"}, {"kv", "kv"}, {"weight_fused", "weight_fused"}}, {});
    expect_same(calls, {"out", "dot", "alpha", "rstd_residual", "rstd_key"}, s.text());
  }
}

TEST_P(Parts, GatherOf8BitRowsHasTheBitsOfTheirValues) {
  EHC_NEEDS("engram.gather_dequant", "engram.dequant_rows", "engram.gather_fwd");
  for (const char* type : {"BF16", "F16", "F32"}) {
    const cli::CaseInputs inputs =
        inputs_of("engram.gather_dequant T=31 Nmax=3 Kh=4 rows=50 hd=96");
    NamedCalls calls = calls_with(context(), inputs);
    calls.call("engram.gather_dequant", {{"out_dtype", type}},
               {{"weight", "weight"}, {"scale", "scale"}, {"indices", "indices"}},
               fused({"embedding"}));
    calls.call("engram.dequant_rows", {{"out_dtype", type}},
               {{"weight", "weight"}, {"scale", "scale"}}, {});
    calls.call("engram.gather_fwd", {}, {{"table", "values"}, {"indices", "indices"}}, {});
    expect_same(calls, {"embedding"}, type);
  }
}

INSTANTIATE_TEST_SUITE_P(Devices, Parts, testing::Values(Device::cpu, Device::cuda),
                         [](const auto& device) {
                           return std::string(device.param == Device::cpu ? "cpu" : "cuda");
                         });

}  // namespace
}  // namespace ehc
