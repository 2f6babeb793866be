# The operators, in the order in which `ehc op --list` prints them.
ehc_operator(engram/hash)
ehc_operator(engram/gate)
