"""How values of each stream type are read from a request.

::

    python_tensors.py   pyovms.Tensor, and its bytes
    arrays.py           OvTensor, MediaPipeTensor, TfTensor
    images.py           ImageFrame
    rejections.py       the words in which all of them refuse
"""
