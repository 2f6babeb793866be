/* The stable C interface: every operator of the library, found by its name and called on DLPack
   tensors. Plain C99; needs no other header of the library.

   Conventions
   - A function that can fail returns an ehc_status; ehc_last_error() then holds one line that names
     what was expected and what came. A null or senseless argument is an error, never a crash.
   - Pointers that the library returns (names, tables) stay valid for the life of the process.
   - Structs that the library returns by pointer may grow at their end in later versions; structs
     that the caller fills do not change within one SONAME.
   - Operators, their tensors and their attributes are those that `ehc op --list --json` prints. */
#ifndef EHC_C_API_H
#define EHC_C_API_H

#include <stddef.h>
#include <stdint.h>

#include "ehc/export.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The numbers of `ehc op`'s exit codes where they mean the same. */
typedef enum ehc_status {
  EHC_OK = 0,
  EHC_CONTRACT = 3,    /* an argument breaks the contract; the text names it */
  EHC_IO = 4,          /* a file cannot be read, written or understood */
  EHC_UNAVAILABLE = 5, /* the device, or an implementation for it, is not there */
  EHC_INTERNAL = 6     /* out of memory, or a system call or driver failed */
} ehc_status;

/* Text of this thread's last failure, "" when there was none. Valid until the thread's next call
   that fails; a call that succeeds leaves it alone. */
EHC_API const char* ehc_last_error(void);

/* "0.1.0", and 10000 * major + 100 * minor + patch, of the library that runs (EHC_VERSION of
   ehc/version.h is that of the headers). */
EHC_API const char* ehc_version(void);
EHC_API int32_t ehc_version_number(void);

/* What this build holds, as JSON: {"version", "instruction_sets" that this processor runs too,
   "matrix_product", "cuda"}. */
EHC_API const char* ehc_build_info(void);
/* The CUDA devices that are there, as a JSON list of {"index", "description"}; made anew by each
   call of this thread. */
EHC_API const char* ehc_device_info(void);

/* --- tensors -----------------------------------------------------------------------------------
   ehc_tensor has the layout of DLPack's DLTensor: pass a `DLTensor*` by a cast. Shape and strides
   are in elements; strides == NULL means row-major. `data + byte_offset` is the first element.
   Types:   F32 {2,32} F16 {2,16} BF16 {4,16} F8_E4M3 {10,8} F8_E8M0 {14,8} I64 {0,64} I32 {0,32}
            U8 {1,8} BOOL {6,8}, each {code,bits} with 1 lane.
   Devices: 1 host, 2 CUDA, 3 pinned host memory (treated as host). */
typedef struct ehc_device {
  int32_t type;
  int32_t id;
} ehc_device;

typedef struct ehc_dtype {
  uint8_t code;
  uint8_t bits;
  uint16_t lanes;
} ehc_dtype;

typedef struct ehc_tensor {
  void* data;
  ehc_device device;
  int32_t ndim; /* 0..8 */
  ehc_dtype dtype;
  const int64_t* shape;
  const int64_t* strides;
  uint64_t byte_offset;
} ehc_tensor;

enum { EHC_HOST = 1, EHC_CUDA = 2, EHC_CUDA_HOST = 3, EHC_MAX_RANK = 8 };

/* --- contexts ----------------------------------------------------------------------------------
   Where operators run. One context serves one thread at a time. */
typedef struct ehc_context ehc_context;

/* A persistent pool of `threads` threads; 0 takes the number of usable cores, 1 runs on the caller.
   Results do not depend on the number. */
EHC_API ehc_status ehc_context_create_cpu(int32_t threads, ehc_context** context);
/* Operators are enqueued on `stream` (a cudaStream_t; NULL is the legacy default stream) and return
   before they are done. EHC_UNAVAILABLE without CUDA or without that device. */
EHC_API ehc_status ehc_context_create_cuda(int32_t device_index, void* stream,
                                           ehc_context** context);
/* NULL is allowed. */
EHC_API void ehc_context_destroy(ehc_context* context);

/* Scratch memory on the context's device; it stays the caller's and must live through the calls
   that use it. Operators never allocate: ask ehc_workspace_bytes. NULL takes it away. */
EHC_API ehc_status ehc_context_set_workspace(ehc_context* context, void* data, size_t bytes);
/* Restricts the choice of implementation: "reference", "cpu.avx2", or a family, "cpu", where none
   has that very name. NULL or "" lets the library choose. */
EHC_API ehc_status ehc_context_set_implementation(ehc_context* context, const char* name);
/* One line per call: the implementation chosen and why earlier ones refused. NULL: no log. */
typedef void (*ehc_log)(void* user, const char* line);
EHC_API ehc_status ehc_context_set_log(ehc_context* context, ehc_log log, void* user);

/* --- operators ---------------------------------------------------------------------------------*/
typedef struct ehc_operator ehc_operator;

EHC_API size_t ehc_op_count(void);
/* NULL (and a text) beyond the last. */
EHC_API const ehc_operator* ehc_op_at(size_t position);
/* NULL (and a text) when no operator has this name. Keep the handle: it is the fast way to call. */
EHC_API const ehc_operator* ehc_op_find(const char* name);

typedef struct ehc_op_info {
  const char* name;    /* "engram.gate_fwd" */
  const char* section; /* of the contract */
  const char* summary;
  size_t tensor_count;
  size_t attribute_count;
  size_t implementation_count;
} ehc_op_info;

/* One tensor of an operator's table. Inputs and outputs have positions of one common sequence; an
   input and an output may share a name. */
typedef struct ehc_tensor_info {
  const char* name;        /* of a list "pre.L": its tensors are named "pre.0", "pre.1" and so on */
  const char* pattern;     /* types and shape as the table writes them: "A[T,n,d]" */
  const ehc_dtype* dtypes; /* every type that some call allows */
  size_t dtype_count;
  int32_t is_output;
  int32_t is_optional;
  int32_t is_contiguous; /* strides are not free */
  int32_t is_list;       /* its tensors are given by name, without gaps */
  const char* condition; /* output: when it is made, e.g. "save|mode=stats"; "" = always */
  int32_t alias;         /* output: position of the input that it may share memory with, or -1 */
} ehc_tensor_info;

typedef enum ehc_attribute_type {
  EHC_INTEGER = 0,
  EHC_REAL = 1,
  EHC_BOOLEAN = 2,
  EHC_CHOICE = 3,
  EHC_INTEGERS = 4,
  EHC_TEXT = 5 /* only in a call: the command line's form of any type */
} ehc_attribute_type;

typedef struct ehc_attribute_info {
  const char* name;
  ehc_attribute_type type;
  const char* choices;     /* EHC_CHOICE: "add/value/stats"; else "" */
  int32_t has_default;     /* then one of the next two holds it */
  int64_t default_integer; /* integer; boolean 0 or 1; position of the choice */
  double default_real;
  const char* computed;       /* how a missing value is computed, "sqrt(hd)"; else "" */
  const char* needed_with;    /* required when this tensor is present, or "" */
  const char* needed_without; /* required when this tensor is absent, or "" */
  int32_t has_range;
  double least;
  double most;
  int32_t least_is_open; /* least < value instead of least <= value */
} ehc_attribute_info;

typedef struct ehc_implementation_info {
  const char* name;       /* "cpu.avx512" */
  int32_t device_type;    /* EHC_HOST or EHC_CUDA */
  int32_t uses_workspace; /* 0: ehc_workspace_bytes is 0 for every call that it runs */
} ehc_implementation_info;

/* NULL (and a text) for a null operator or a position that it does not have. */
EHC_API const ehc_op_info* ehc_op_describe(const ehc_operator* op);
EHC_API const ehc_tensor_info* ehc_op_tensor(const ehc_operator* op, size_t position);
EHC_API const ehc_attribute_info* ehc_op_attribute(const ehc_operator* op, size_t position);
EHC_API const ehc_implementation_info* ehc_op_implementation(const ehc_operator* op,
                                                             size_t position);
/* Position of a tensor or attribute, -1 (and a text) when there is none. */
EHC_API int32_t ehc_op_input_position(const ehc_operator* op, const char* name);
EHC_API int32_t ehc_op_output_position(const ehc_operator* op, const char* name);
EHC_API int32_t ehc_op_attribute_position(const ehc_operator* op, const char* name);

/* --- calls -------------------------------------------------------------------------------------*/

/* A value: `integer` for EHC_INTEGER, EHC_BOOLEAN (0, 1) and EHC_CHOICE (position), `real` for
   EHC_REAL, `integers` and `count` for EHC_INTEGERS, `text` for EHC_TEXT ("1e-6", "true", "1,14",
   "value"). An integer may be given for a real attribute. */
typedef struct ehc_attribute {
  const char* name; /* NULL: `position` says which */
  int32_t position;
  int32_t type; /* ehc_attribute_type */
  int64_t integer;
  double real;
  const int64_t* integers;
  size_t count;
  const char* text;
} ehc_attribute;

typedef struct ehc_named_tensor {
  const char* name;
  int32_t is_output;
  const ehc_tensor* tensor; /* NULL: absent */
} ehc_named_tensor;

/* Arguments of one call. Tensors come by position, by name, or both (a name then wins). Attributes
   not given keep their defaults. Zero-initialise what you do not use. */
typedef struct ehc_arguments {
  const ehc_tensor* const*
      tensors;         /* by position of the table; NULL entries are absent, and lists */
  size_t tensor_count; /* entries of `tensors`; missing ones are absent */
  const ehc_named_tensor* named_tensors;
  size_t named_tensor_count;
  const ehc_attribute* attributes;
  size_t attribute_count;
} ehc_arguments;

/* Checks everything, then runs. Nothing is written when an argument is refused. An output may be
   the very same view as the input that its `alias` names; any other overlap is refused. */
EHC_API ehc_status ehc_run(ehc_context* context, const ehc_operator* op,
                           const ehc_arguments* arguments);

/* Type and shape of an output, before there is memory for it. */
typedef struct ehc_layout {
  ehc_dtype dtype; /* bits == 0: this call does not make the output */
  int32_t ndim;
  int64_t shape[EHC_MAX_RANK];
} ehc_layout;

/* Checks attributes and inputs (data may be null) and fills layouts[0 .. layout_count), by position
   of the table; entries of inputs have bits == 0, that of a list is the layout of each of its
   tensors. layout_count must be the operator's tensor_count. Outputs among the arguments are
   ignored. */
EHC_API ehc_status ehc_infer_outputs(const ehc_operator* op, const ehc_arguments* arguments,
                                     ehc_layout* layouts, size_t layout_count);

/* Bytes of workspace that ehc_run with the same arguments, outputs included, would need. */
EHC_API ehc_status ehc_workspace_bytes(const ehc_context* context, const ehc_operator* op,
                                       const ehc_arguments* arguments, size_t* bytes);

/* --- token maps --------------------------------------------------------------------------------
   From the ids of a tokenizer to the smaller set of ids that the n-gram hash works on (ehc/text.h,
   contract 1.1). Host only; paths and texts are UTF-8. */
typedef struct ehc_token_map ehc_token_map;

/* From a Hugging Face tokenizer.json, and from a map file. EHC_IO names the file and its fault. */
EHC_API ehc_status ehc_token_map_build(const char* tokenizer_json, ehc_token_map** map);
EHC_API ehc_status ehc_token_map_load(const char* path, ehc_token_map** map);
/* Readers of `path` see the old file or the whole new one. */
EHC_API ehc_status ehc_token_map_save(const ehc_token_map* map, const char* path);
/* NULL is allowed. */
EHC_API void ehc_token_map_destroy(ehc_token_map* map);

typedef struct ehc_token_map_info {
  const int32_t* table; /* [vocab_size], values in [0, size) */
  int64_t vocab_size;
  int32_t size; /* number of compressed ids */
} ehc_token_map_info;

/* Valid as long as the map; NULL (and a text) for a null map. */
EHC_API const ehc_token_map_info* ehc_token_map_describe(const ehc_token_map* map);

/* The key of a token's text. `length` becomes the bytes of the key, of which the first `capacity`
   are written, without a final zero; key may be null when capacity is 0. */
EHC_API ehc_status ehc_normalize(const char* text, size_t bytes, char* key, size_t capacity,
                                 size_t* length);

#ifdef __cplusplus
}
#endif

#endif /* EHC_C_API_H */
