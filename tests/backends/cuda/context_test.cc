// Contexts on a device: what they refuse, and workspace.
#include "cli/op_file.h"
#include "tests/backends/cuda/device_support.h"

namespace ehc {
namespace {

using test::error_text;
using test::first_case;
using test::operators_on;

TEST(CudaContext, RefusesADeviceThatIsNotThere) {
  ErrorKind kind = ErrorKind::internal;
  const std::string text = error_text([] { (void)Context::cuda(1000, nullptr); }, kind);
  EXPECT_EQ(kind, ErrorKind::unavailable) << text;
  EXPECT_NE(text.find("device 'cuda'"), std::string::npos) << text;
}

// Values are in host memory before `ehc op` hands them to a device; here too without one.
TEST(CudaContext, ValuesAreCheckedBeforeTheyGoToTheDevice) {
  const int32_t ids[5] = {1, 2, 3, 4, 5};
  const int32_t borders[3] = {0, 4, 3};  // not ascending
  DynamicCall call(*find_operator("engram.window"));
  call.set_input("ids", Tensor(ids, DType::i32, {5}));
  call.set_input("cu_seqlens", Tensor(borders, DType::i32, {3}));
  call.set_attribute("max_ngram", int64_t{3});
  call.set_attribute("pad_id", int64_t{0});
  call.set_attribute_text("blocking", "slot");
  ErrorKind kind = ErrorKind::internal;
  const std::string text = error_text([&] { cli::run_call(call, Device::cuda, {}, 1); }, kind);
  EXPECT_EQ(kind, ErrorKind::contract) << text;
  EXPECT_NE(text.find("cu_seqlens"), std::string::npos) << text;
}

TEST(CudaContext, KeepsItsDeviceAndStream) {
  EHC_NEEDS_DEVICE();
  const cuda_graph::Stream stream(0);
  const Context context = Context::cuda(0, stream.get());
  EXPECT_EQ(context.device(), Device::cuda);
  EXPECT_EQ(context.device_index(), 0);
  EXPECT_EQ(context.stream(), stream.get());
}

TEST(CudaContext, RefusesMemoryOfTheHost) {
  EHC_NEEDS_DEVICE();
  for (const Operator* op : operators_on(Device::cuda)) {
    const cli::CaseInputs inputs(*op, first_case(*op));
    DynamicCall call(*op);
    inputs.bind(call);
    std::deque<Buffer> outputs;
    const std::vector<Tensor> made = call.outputs();
    for (size_t i = 0; i < made.size(); ++i) {
      if (!made[i].present()) continue;
      call.tensor(i) = made[i];
      call.tensor(i).data = outputs.emplace_back(Context::cpu(1), bytes_of(made[i])).data();
    }
    Context context = Context::cuda(0, nullptr);
    ErrorKind kind = ErrorKind::internal;
    const std::string text = error_text([&] { (void)call.plan(context); }, kind);
    EXPECT_EQ(kind, ErrorKind::contract) << op->schema.name << ": " << text;
    EXPECT_NE(text.find("cuda"), std::string::npos) << text;
  }
}

TEST(CudaContext, WorkspaceOfTheSizeThatWasAskedForIsEnoughAndLessIsNot) {
  EHC_NEEDS_DEVICE();
  int with_workspace = 0;
  for (const Operator* op : operators_on(Device::cuda)) {
    const cli::CaseInputs inputs(*op, first_case(*op));
    Context context = Context::cuda(0, nullptr);
    test::NamedCalls calls = test::calls_with(context, inputs);
    DynamicCall call(*op);
    inputs.prepare(call);
    for (size_t i = 0; i < inputs.tensors().size(); ++i) {
      if (inputs.tensors()[i].present()) call.tensor(i) = calls.at(inputs.name_of(i));
    }
    std::deque<Buffer> outputs;
    const std::vector<Tensor> made = call.outputs();
    for (size_t i = 0; i < made.size(); ++i) {
      if (!made[i].present()) continue;
      outputs.emplace_back(context, bytes_of(made[i]));
      call.tensor(i) = Tensor(outputs.back().data(), made[i].dtype, made[i].shape, made[i].rank,
                              Device::cuda, 0);
    }
    for (const auto& [output, input] : call.shared_memory()) {
      if (made[output].present()) call.tensor(output) = call.tensor(input);
    }
    const size_t bytes = call.plan(context).workspace_bytes;
    const Buffer workspace(context, bytes);
    if (bytes > 0) {
      ++with_workspace;
      context.set_workspace(workspace.data(), bytes - 1);
      ErrorKind kind = ErrorKind::internal;
      const std::string text = error_text([&] { call.run(context); }, kind);
      EXPECT_EQ(kind, ErrorKind::contract) << op->schema.name << ": " << text;
      EXPECT_NE(text.find("workspace: expected at least " + std::to_string(bytes)),
                std::string::npos)
          << op->schema.name << ": " << text;
    }
    context.set_workspace(workspace.data(), bytes);
    EXPECT_NO_THROW(call.run(context)) << op->schema.name;
    EXPECT_NO_THROW(synchronize(context)) << op->schema.name;
  }
  RecordProperty("with_workspace", with_workspace);
}

TEST(CudaContext, WorkForTheHostAloneIsUnavailable) {
  EHC_NEEDS_DEVICE();
  for (const Operator* op : all_operators()) {
    if (test::runs_on(*op, Device::cuda)) continue;
    const cli::CaseInputs inputs(*op, first_case(*op));
    Context context = Context::cuda(0, nullptr);
    // A refusal is the text of an Error{unavailable}.
    EXPECT_NE(cli::run_case(inputs, inputs.tensors(), context, {}).refusal, "") << op->schema.name;
  }
}

}  // namespace
}  // namespace ehc
