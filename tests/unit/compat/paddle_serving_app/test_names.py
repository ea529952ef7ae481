from __future__ import annotations

NAMES = {
    "image_reader": (
        "ImageReader File2Image URL2Image Base64ToImage String2Image Sequential Lambda Normalize Div CenterCrop Resize "
        "ResizeByFactor PadStride Transpose RGB2BGR BGR2RGB DetectionFile2Image DetectionSequential DetectionNormalize "
        "DetectionTranspose DetectionResize DetectionBGR2RGB DetectionPadStride DetectionDiv SegPostprocess "
        "RCNNPostprocess BlazeFacePostprocess DBPostProcess FilterBoxes GetRotateCropImage SortedBoxes "
        "generate_colormap"
    ),
    "functional": "transpose normalize crop resize",
    "ocr_reader": "OCRReader CharacterOps BaseRecLabelDecode CTCLabelDecode",
    "pptsn_reader": "VideoDecoder Sampler Scale TenCrop Image2Array Normalization",
    "lac_reader": "LACReader load_kv_dict",
    "senta_reader": "SentaReader",
    "imdb_reader": "IMDBDataset",
    "chinese_bert_reader": "ChineseBertReader",
    "bert_base_reader": "BertBaseReader",
    "reader": "ReaderBase",
    "batching": "pad_batch_data prepare_batch_data",
    "tokenization": (
        "FullTokenizer CharTokenizer BasicTokenizer WordpieceTokenizer convert_to_unicode printable_text load_vocab "
        "convert_by_vocab convert_tokens_to_ids convert_ids_to_tokens whitespace_tokenize"
    ),
}
