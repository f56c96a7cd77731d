"""The legend of dimensions: every shape in the project is spelled with these words.

batch      independent sequences that share a length axis (padded on the right where they are ragged)
length     positions of a sequence, in time order
width      numbers in one state of the scan; the operator maps (width, width) -> width
rows       operands laid side by side for one operator call; which sequence a row came from is forgotten
documents  sequences of any lengths laid end to end without padding
total      the sum of the documents' lengths
blocks     complete, aligned subtrees that a scan state holds: one for each set bit of each row's length

The names below are documentation for readers and editors; nothing checks them at run time.
"""

from typing import Annotated

from torch import Tensor

Rows = Annotated[Tensor, "rows width"]
Batch = Annotated[Tensor, "batch length width"]
Packed = Annotated[Tensor, "total width"]
Roots = Annotated[Tensor, "batch width"]
Blocks = Annotated[Tensor, "blocks width"]
Tokens = Annotated[Tensor, "batch length, or total"]
