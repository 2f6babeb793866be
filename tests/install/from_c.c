#include <ehc/c_api.h>
#include <ehc/version.h>
#include <stdio.h>
#include <string.h>

int main(void) {
  const ehc_operator* hash = ehc_op_find("engram.hash");
  if (hash == NULL || ehc_op_find("no.such") != NULL) return 1;
  printf("ehc %s: %s, then: %s\n", ehc_version(), ehc_op_describe(hash)->name, ehc_last_error());
  return strcmp(ehc_version(), EHC_VERSION_STRING);
}
