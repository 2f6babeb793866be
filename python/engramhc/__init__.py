"""EngramHC: Engram and mHC operators.

Importing the package loads nothing else; take what you need:
`engramhc.reference` holds the double-precision NumPy reference of every operator.
"""
