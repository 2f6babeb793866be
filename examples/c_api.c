/* The library from plain C: find an operator, ask what it returns, run it, and see an error.

   cc -std=c11 c_api.c $(pkg-config --cflags --libs ehc) && ./a.out */
#include <ehc/c_api.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>

static ehc_tensor tensor(void* data, ehc_dtype dtype, int32_t rank, const int64_t* shape) {
  ehc_tensor t = {0};
  t.data = data;
  t.device.type = EHC_HOST;
  t.dtype = dtype;
  t.ndim = rank;
  t.shape = shape; /* strides stay NULL: row-major */
  return t;
}

static int failed(const char* what) {
  fprintf(stderr, "%s: %s\n", what, ehc_last_error());
  return EXIT_FAILURE;
}

int main(void) {
  const ehc_dtype i32 = {0, 32, 1};
  const ehc_dtype i64 = {0, 64, 1};

  /* Two tokens with their predecessors; one layer, bigrams, two heads of 7 and 11 rows. */
  int32_t window[2][2] = {{5, 3}, {8, 5}};
  int64_t multipliers[1][2] = {{3, 5}};
  int32_t sizes[1][1][2] = {{{7, 11}}};
  int32_t offsets[1][2] = {{0, 7}};
  const int64_t window_shape[] = {2, 2};
  const int64_t multipliers_shape[] = {1, 2};
  const int64_t sizes_shape[] = {1, 1, 2};
  const int64_t offsets_shape[] = {1, 2};
  const ehc_tensor window_tensor = tensor(window, i32, 2, window_shape);
  const ehc_tensor multipliers_tensor = tensor(multipliers, i64, 2, multipliers_shape);
  const ehc_tensor sizes_tensor = tensor(sizes, i32, 3, sizes_shape);
  const ehc_tensor offsets_tensor = tensor(offsets, i32, 2, offsets_shape);

  const ehc_operator* hash = ehc_op_find("engram.hash");
  if (hash == NULL) return failed("ehc_op_find");
  const ehc_op_info* info = ehc_op_describe(hash);
  printf("%s: %s\n", info->name, info->summary);

  ehc_named_tensor tensors[5] = {{"window", 0, &window_tensor},
                                 {"multipliers", 0, &multipliers_tensor},
                                 {"vocab_sizes", 0, &sizes_tensor},
                                 {"offsets", 0, &offsets_tensor}};
  ehc_attribute layout = {0};
  layout.name = "layout";
  layout.type = EHC_TEXT;
  layout.text = "TLC";
  ehc_arguments arguments = {0};
  arguments.named_tensors = tensors;
  arguments.named_tensor_count = 4;
  arguments.attributes = &layout;
  arguments.attribute_count = 1;

  /* What will come out? */
  ehc_layout* layouts = calloc(info->tensor_count, sizeof(ehc_layout));
  if (layouts == NULL) return EXIT_FAILURE;
  if (ehc_infer_outputs(hash, &arguments, layouts, info->tensor_count) != EHC_OK) {
    return failed("ehc_infer_outputs");
  }
  const ehc_layout out = layouts[ehc_op_output_position(hash, "indices")];
  free(layouts);
  printf("indices: %d bits, [%" PRId64 ",%" PRId64 ",%" PRId64 "]\n", out.dtype.bits, out.shape[0],
         out.shape[1], out.shape[2]);

  int32_t indices[2][1][2];
  const ehc_tensor indices_tensor = tensor(indices, out.dtype, out.ndim, out.shape);
  tensors[4].name = "indices";
  tensors[4].is_output = 1;
  tensors[4].tensor = &indices_tensor;
  arguments.named_tensor_count = 5;

  ehc_context* context = NULL;
  if (ehc_context_create_cpu(1, &context) != EHC_OK) return failed("ehc_context_create_cpu");
  if (ehc_run(context, hash, &arguments) != EHC_OK) return failed("ehc_run");
  for (int t = 0; t < 2; ++t) {
    printf("token %d: rows %d %d\n", t, indices[t][0][0], indices[t][0][1]);
  }

  /* A wrong argument is a status and a text, and nothing is written. */
  sizes[0][0][1] = 0;
  const ehc_status status = ehc_run(context, hash, &arguments);
  printf("status %d: %s\n", (int)status, ehc_last_error());
  ehc_context_destroy(context);
  return status == EHC_CONTRACT ? EXIT_SUCCESS : EXIT_FAILURE;
}
