"""Names of dimensions. All shapes in the project are written with these words.

batch      independent sequences with a common length axis; shorter sequences are padded on the right
length     positions of a sequence, in time order
width      numbers in one state of the scan; the operator maps (width, width) -> width
rows       operands of one operator call, stacked regardless of the sequences that they come from
documents  sequences of any lengths, concatenated without padding
total      the sum of the documents' lengths
blocks     complete, aligned subtrees stored in a scan state: one for each set bit of each sequence's length

The types below are documentation for readers and editors; nothing checks them at run time.
"""

from typing import Annotated

from torch import Tensor

Rows = Annotated[Tensor, "rows width"]
Batch = Annotated[Tensor, "batch length width"]
Packed = Annotated[Tensor, "total width"]
Roots = Annotated[Tensor, "batch width"]
Blocks = Annotated[Tensor, "blocks width"]
Tokens = Annotated[Tensor, "batch length, or total"]
