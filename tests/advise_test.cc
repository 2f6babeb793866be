// `ehc advise` against the contract's table of bytes and operations, and against `ehc bench`.
#include "cli/advise.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <set>

#include "cli/commands.h"
#include "core/registry.h"
#include "ehc/error.h"

namespace ehc::cli {
namespace {

// Of a line without defaults: "mhc.post_fwd T=8192 d=4096".
Advice advice_of(const std::string& text) {
  const CaseLine line = parse_cases(text, "file").front();
  const Operator* op = find_operator(line.op);
  if (op == nullptr) throw Error(ErrorKind::contract, "no operator " + line.op);
  return advise(*op, line, Context::cpu(2));
}

double per_item(double all, const Advice& a) { return all / static_cast<double>(a.batch); }

// --- the table of the contract, part 4 -----------------------------------------------------------

struct TableRow {
  const char* call;
  double bytes_4096;
  double flops_4096;
  double microseconds_4096;
  double bytes_7168;
  double microseconds_7168;
};

constexpr TableRow kTable[] = {
    {"engram.gate_fwd", 106496, 147456, 181.8, 186368, 318.1},
    {"engram.gate_fwd save=true", 106560, 147456, 181.9, 186432, 318.2},
    {"engram.gate_bwd with=dot", 180288, 262144, 307.7, 315456, 538.4},
    {"engram.conv_fwd", 65536, 294912, 111.8, 114688, 195.7},
    {"engram.layer_fwd with=conv_weight", 106496, 442368, 181.8, 186368, 318.1},
    {"mhc.expand_fwd", 40960, 0, 69.9, 71680, 122.3},
    {"mhc.expand_bwd", 40960, 12288, 69.9, 71680, 122.3},
    {"mhc.prenorm_gemm splits=16", 34368, 819200, 58.7, 58944, 100.6},
    {"mhc.reduce_partials_fwd", 1796, 424, 3.1, 1796, 3.1},
    {"mhc.norm_fn_bwd with=grad_residual_acc", 98404, 1605632, 167.9, 172132, 293.8},
    {"mhc.split_fwd", 192, 96, 0.3, 192, 0.3},
    {"mhc.sinkhorn_fwd", 128, 1468, 0.2, 128, 0.2},
    {"mhc.sinkhorn_bwd", 192, 4404, 0.3, 192, 0.3},
    {"mhc.pre_apply_fwd", 40976, 32768, 69.9, 71696, 122.4},
    {"mhc.pre_apply_bwd with=grad_residual_acc", 106528, 65536, 181.8, 186400, 318.1},
    {"mhc.pre_big_fuse", 42640, 32768 + 424 + 96 + 1468, 72.8, 73360, 125.2},
    {"mhc.post_fwd", 73808, 147456, 126.0, 129104, 220.3},
    {"mhc.post_bwd", 114848, 327680, 196.0, 200864, 342.8},
    {"mhc.multilayer_recompute L=10 Lp=10 with=layer_output.L", 525248, 1802240, 896.4, 918464,
     1567.5},
};

TEST(Advice, IsThatOfTheContractsTable) {
  const ModelDevice device;
  for (const TableRow& row : kTable) {
    SCOPED_TRACE(row.call);
    const std::string shape = std::string(row.call) + " T=8192";
    const Advice narrow = advice_of(shape + " d=4096");
    EXPECT_EQ(per_item(narrow.traffic.batch, narrow), row.bytes_4096);
    EXPECT_EQ(per_item(static_cast<double>(narrow.flops), narrow), row.flops_4096);
    EXPECT_NEAR(narrow.seconds_of_bytes(device) * 1e6, row.microseconds_4096, 0.051);
    const Advice wide = advice_of(shape + " d=7168");
    EXPECT_EQ(per_item(wide.traffic.batch, wide), row.bytes_7168);
    EXPECT_NEAR(wide.seconds_of_bytes(device) * 1e6, row.microseconds_7168, 0.051);
    EXPECT_NEAR(narrow.intensity(), row.flops_4096 / row.bytes_4096, 1e-12);
  }
}

TEST(Advice, LayerByLayerRecomputeMovesWhatTheTableSays) {
  for (const auto& [d, bytes] : {std::pair("4096", 1147840.0), std::pair("7168", 2008000.0)}) {
    const std::string shape = std::string(" T=8192 d=") + d;
    const Advice pre = advice_of("mhc.pre_apply_fwd" + shape);
    const Advice post = advice_of("mhc.post_fwd" + shape);
    EXPECT_EQ(10 * per_item(pre.traffic.batch + post.traffic.batch, pre), bytes);
  }
}

TEST(Advice, ParametersAndPartialSumsStandApart) {
  const Advice gate = advice_of("engram.gate_bwd with=dot T=8192 d=4096");
  EXPECT_EQ(gate.traffic.shared, 4 * 4 * 4096) << "the fused weight";
  EXPECT_EQ(gate.traffic.partials, 128.0 * 4 * 4 * 4096) << "min(128, ceil(T/8)) of them";
  const Advice gemm = advice_of("mhc.prenorm_gemm T=8192 d=7168");
  EXPECT_EQ(gemm.traffic.shared, 24.0 * 4 * 28672);
  EXPECT_EQ(gemm.traffic.partials, 0);
  const Advice step =
      advice_of("engram.optimizer_step rows=10 hd=64 weight=F32 grad=F32 momentum=F32");
  EXPECT_EQ(step.batch_axis, "rows");
  EXPECT_EQ(step.traffic.total(), 10 * 64 * (16 + 4 * 20 + 12));
}

TEST(Advice, SideOfTheRidge) {
  const ModelDevice device;
  EXPECT_NEAR(device.ridge(), 14, 0.1);
  EXPECT_LT(advice_of("mhc.post_fwd T=8192 d=4096").intensity(), device.ridge());
  EXPECT_GT(advice_of("mhc.prenorm_gemm T=8192 d=4096").intensity(), device.ridge());
}

// --- formulas of the contract at random shapes ---------------------------------------------------

struct Sizes {
  double n, d, S, R, L, w, rows, hd, E, P;
};
struct Formula {
  const char* call;
  std::function<double(const Sizes&)> bytes;  // of the batch, for each of it; bf16
  std::function<double(const Sizes&)> flops;  // of all; with `T` or rows 1
};

// Written from the sections of the contract, not from the tables.
const std::vector<Formula>& formulas() {
  static const std::vector<Formula> kFormulas = {
      {"engram.gate_fwd", [](auto& s) { return (6 * s.n + 2) * s.d; },
       [](auto& s) { return 9 * s.n * s.d; }},
      {"engram.gate_bwd with=dot", [](auto& s) { return (10 * s.n + 4) * s.d + 16 * s.n; },
       [](auto& s) { return 16 * s.n * s.d; }},
      {"engram.layer_fwd", [](auto& s) { return (6 * s.n + 2) * s.d; },
       [](auto& s) { return 9 * s.n * s.d; }},
      {"engram.conv_fwd", [](auto& s) { return 4 * s.n * s.d; },
       [](auto& s) { return (10 + 2 * s.w) * s.n * s.d; }},
      {"engram.kv_projection_fwd", [](auto& s) { return 2 * s.E + 2 * (s.n + 1) * s.d; },
       [](auto& s) { return 2 * s.E * (s.n + 1) * s.d; }},
      {"mhc.expand_fwd", [](auto& s) { return 2 * (1 + s.n) * s.d; }, [](auto&) { return 0; }},
      {"mhc.expand_bwd", [](auto& s) { return 2 * (1 + s.n) * s.d; },
       [](auto& s) { return (s.n - 1) * s.d; }},
      {"mhc.prenorm_gemm splits=SPLITS",
       [](auto& s) { return 2 * s.n * s.d + 4 * s.S * (s.n * s.n + 2 * s.n + 1); },
       [](auto& s) { return 2 * (s.n * s.n + 2 * s.n) * s.n * s.d + 2 * s.n * s.d; }},
      {"mhc.reduce_partials_fwd",
       [](auto& s) {
         const double mixes = s.n * s.n + 2 * s.n;
         return 4 * s.S * (mixes + 1) + 4 * (2 * mixes + 1);
       },
       [](auto& s) {
         const double mixes = s.n * s.n + 2 * s.n;
         return s.S * (mixes + 1) + mixes;
       }},
      {"mhc.norm_fn_bwd with=grad_residual_acc",
       [](auto& s) { return 6 * s.n * s.d + 4 * (s.n * s.n + 2 * s.n + 1); },
       [](auto& s) { return (4 * (s.n * s.n + 2 * s.n) + 2) * s.n * s.d; }},
      {"mhc.split_fwd", [](auto& s) { return 8 * (s.n * s.n + 2 * s.n); },
       [](auto& s) { return 4 * (s.n * s.n + 2 * s.n); }},
      {"mhc.sinkhorn_fwd", [](auto& s) { return 8 * s.n * s.n; },
       [](auto& s) { return (2 * s.R - 1) * (2 * s.n * s.n + s.n) + 4 * s.n * s.n; }},
      {"mhc.sinkhorn_bwd", [](auto& s) { return 12 * s.n * s.n; },
       [](auto& s) { return 3 * ((2 * s.R - 1) * (2 * s.n * s.n + s.n) + 4 * s.n * s.n); }},
      {"mhc.pre_apply_fwd", [](auto& s) { return (2 * s.n + 2) * s.d + 4 * s.n; },
       [](auto& s) { return 2 * s.n * s.d; }},
      {"mhc.pre_apply_bwd", [](auto& s) { return (4 * s.n + 2) * s.d + 8 * s.n; },
       [](auto& s) { return 4 * s.n * s.d; }},
      {"mhc.post_fwd", [](auto& s) { return (4 * s.n + 2) * s.d + 4 * (s.n * s.n + s.n); },
       [](auto& s) { return (2 * s.n * s.n + s.n) * s.d; }},
      {"mhc.post_bwd", [](auto& s) { return (6 * s.n + 4) * s.d + 8 * (s.n * s.n + s.n); },
       [](auto& s) { return (4 * s.n * s.n + 4 * s.n) * s.d; }},
      {"mhc.multilayer_recompute with=layer_output.L",
       [](auto& s) {
         return 2 * s.n * s.d + s.L * (4 * s.n + 2 * s.d) +
                s.L * (2 * s.d + 4 * s.n + 4 * s.n * s.n + 2 * s.n * s.d);
       },
       [](auto& s) { return s.L * (2 * s.n * s.d + (2 * s.n * s.n + s.n) * s.d); }},
      {"mhc.seam_single_pass_fwd",
       [](auto& s) { return 2 * (2 * s.n + 2) * s.d + 8 * (s.n * s.n + 2 * s.n); },
       [](auto& s) {
         const double mixes = s.n * s.n + 2 * s.n;
         return (2 * s.n * s.n + s.n) * s.d + 2 * s.n * s.d + 2 * (mixes + 1) * s.n * s.d +
                5 * mixes + (2 * s.R - 1) * (2 * s.n * s.n + s.n) + 4 * s.n * s.n;
       }},
      {"engram.sinkhorn_finalize", [](auto& s) { return 8 * s.hd + 4; },
       [](auto& s) { return 5 * s.hd; }},
      {"engram.momentum_update grad=F32 momentum=F32", [](auto& s) { return 16 * s.hd; },
       [](auto& s) { return 6 * s.hd; }},
  };
  return kFormulas;
}

TEST(Advice, FollowsTheFormulasAtRandomShapes) {
  std::mt19937 generator(7);
  const auto draw = [&](int most) {
    return static_cast<double>(std::uniform_int_distribution<int>(1, most)(generator));
  };
  for (const Formula& f : formulas()) {
    for (int round = 0; round < 12; ++round) {
      const Sizes s = {draw(8), draw(9000), draw(32),  draw(64),   draw(12),
                       draw(8), draw(9000), draw(512), draw(3000), draw(100)};
      const double tokens = draw(20000);
      std::string call = f.call;
      if (const size_t at = call.find("SPLITS"); at != std::string::npos) {
        call.replace(at, 6, std::to_string(static_cast<int>(s.S)));
      }
      const auto add = [&](const char* name, double value) {
        call += std::string(" ") + name + "=" + std::to_string(static_cast<int64_t>(value));
      };
      add("T", tokens), add("n", s.n), add("d", s.d), add("S", s.S), add("repeat", s.R);
      add("L", s.L), add("w", s.w), add("rows", tokens), add("hd", s.hd), add("E", s.E);
      SCOPED_TRACE(call);
      const Advice a = advice_of(call);
      EXPECT_EQ(per_item(a.traffic.batch, a), f.bytes(s));
      EXPECT_EQ(per_item(static_cast<double>(a.flops), a), f.flops(s));
    }
  }
}

TEST(Advice, SumsOfPartsCountTheirParts) {
  EXPECT_EQ(advice_of("engram.grad_w_reduce P=17 n=3 d=50").flops, (17 + 4) * 3 * 50);
  EXPECT_EQ(advice_of("engram.fused_weight n=3 d=50").flops, 3 * 50);
  EXPECT_EQ(advice_of("engram.fused_weight n=3 d=50").traffic.total(), 8 * 3 * 50);
  EXPECT_EQ(advice_of("mhc.merge_fwd M=24 K=100").flops, 24 * 100);
  EXPECT_EQ(advice_of("mhc.merge_bwd M=24 K=100 with=grad_fn_acc,grad_norm_weight_acc").flops,
            4 * 24 * 100);
  EXPECT_EQ(
      advice_of("mhc.merge_bwd M=24 K=100 with=grad_fn_acc,grad_norm_weight_acc").traffic.total(),
      16 * 24 * 100 + 12 * 100);
  EXPECT_EQ(advice_of("engram.gate_fwd mode=stats T=7 n=2 d=10").flops, 7 * (7 * 2 * 10 + 2 * 10));
  EXPECT_EQ(advice_of("engram.momentum_update rows=7 hd=9 nesterov=false").flops, 3 * 7 * 9);
}

// --- the same count as `ehc bench` ---------------------------------------------------------------

// Shapes alone give what tensors with values give, for every operator and case but those of a
// device, which are many and large.
TEST(Advice, CountsWithoutValuesWhatBenchCountsWithThem) {
  std::set<std::string_view> compared;
  for (const CaseLine& line : load_cases(check_case_texts(), {})) {
    const Operator& op = *find_operator(line.op);
    if (line.level > 1 || line.device != "any" || !line.get("fill").empty()) continue;
    const CaseInputs with(op, line);
    const CaseInputs without(op, line, CaseValues::integers);
    const bool addressed = with.input("indices") != nullptr || with.input("ids") != nullptr;
    DynamicCall call(op);
    with.bind(call);
    const std::vector<Tensor> outputs = call.outputs();
    const Traffic a = traffic_of(with, outputs);
    const Traffic b = traffic_of(without, outputs);
    if (addressed) {
      EXPECT_GE(b.batch, a.batch) << line.text() << ": some indices address no row";
    } else {
      EXPECT_EQ(b.batch, a.batch) << line.text();
    }
    EXPECT_EQ(b.total() - b.batch, a.total() - a.batch) << line.text();
    DynamicCall again(op);
    without.bind(again);
    EXPECT_EQ(again.flops(), call.flops()) << line.text();
    compared.insert(op.schema.name);
  }
  EXPECT_EQ(compared.size(), all_operators().size());
}

TEST(Advice, OperatorsOnNumbersSayHowManyOperationsTheyNeed) {
  const std::set<std::string_view> copies = {"engram.gather_fwd", "mhc.expand_fwd"};
  for (const Operator* op : all_operators()) {
    bool has_numbers = false;
    for (const TensorSpec& spec : op->schema.tensors) {
      has_numbers = has_numbers || (spec.dtypes & kActivationTypes) != 0;
    }
    EXPECT_EQ(!op->schema.flops.empty(), has_numbers && copies.count(op->schema.name) == 0)
        << op->schema.name;
  }
}

// --- sums over the batch, and the choice here ----------------------------------------------------

TEST(Advice, SaysWhereBlocksMustAddUp) {
  const std::set<std::string_view> crossing = {
      "engram.gather_bwd",     "engram.kv_projection_bwd", "engram.gate_bwd",
      "engram.conv_bwd",       "engram.layer_bwd",         "engram.sinkhorn_step",
      "engram.optimizer_step", "mhc.prenorm_gemm",         "mhc.norm_fn_bwd",
      "mhc.split_bwd",         "mhc.head_mix_bwd",         "mhc.pre_bwd",
      "mhc.head_bwd",          "mhc.seam_classic_bwd",     "mhc.seam_single_pass_bwd",
      "mhc.seam_broadcast_bwd"};
  for (const Operator* op : all_operators()) {
    EXPECT_EQ(crosses_blocks(op->schema), crossing.count(op->schema.name) == 1) << op->schema.name;
  }
}

TEST(Advice, NamesTheImplementationThatRuns) {
  const Advice a = advice_of("mhc.post_fwd T=100000000 d=7168");
  EXPECT_EQ(a.call, "mhc.post_fwd T=100000000 d=7168 n=4");
  EXPECT_THAT(a.assumed, testing::ElementsAre("n=4"));
  const Operator& op = *find_operator("mhc.post_fwd");
  const CaseLine small = parse_cases("mhc.post_fwd T=3 n=4 d=64", "file").front();
  const CaseInputs inputs(op, small);
  DynamicCall call(op);
  inputs.bind(call);
  const std::vector<Tensor> made = call.outputs();
  Buffer memory(Context::cpu(1), 3 * 4 * 64 * 2);
  for (size_t i = 0; i < made.size(); ++i) {
    if (made[i].present()) (call.tensor(i) = made[i]).data = memory.data();
  }
  const Plan plan = call.plan(Context::cpu(1));
  EXPECT_EQ(a.implementation, plan.implementation);
  ASSERT_EQ(a.refused.size(), plan.refused.size());
  for (size_t i = 0; i < plan.refused.size(); ++i) {
    EXPECT_EQ(a.refused[i].first, plan.refused[i].implementation);
    EXPECT_EQ(a.refused[i].second, plan.refused[i].reason);
  }
}

TEST(Advice, AsksForTheSizesThatItCannotGuess) {
  const auto message = [](const std::string& text) {
    try {
      (void)advice_of(text);
    } catch (const UsageError& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  EXPECT_EQ(message("mhc.post_fwd T=5"),
            "--shape: expected values of d for mhc.post_fwd, got 'mhc.post_fwd T=5 n=4'");
  EXPECT_EQ(message("mhc.merge_fwd n=4"),
            "--shape: expected values of d for mhc.merge_fwd, got 'mhc.merge_fwd n=4 M=24'");
  EXPECT_THAT(message("engram.gather_fwd T=5"), testing::HasSubstr("values of hd, rows for"));
}

}  // namespace
}  // namespace ehc::cli
