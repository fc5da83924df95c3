//! `CakeMessage`: the messages of both variants. Decoded ones borrow from the payload.

use super::CakeWireError;
use super::frame::frame;
use super::reader::{Reader, put_bytes, put_count};
use super::tensor::CakeTensor;

/// Layers of the largest model, with room.
const LAYERS_MAX: usize = 4096;
/// The shortest text: its count.
const TEXT_BYTES_MIN: usize = 4;
/// The shortest [`CakeOp`]: a text and two numbers.
const OP_BYTES_MIN: usize = TEXT_BYTES_MIN + 16;

/// The two variants differ in the form of [`CakeMessage::ModelDataChunk`] and in three numbers. All that inference needs is
/// the same in both, except for an error's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CakeVariant {
    /// Chunks have a checksum and may be compressed.
    Head,
    Older,
}

#[derive(Clone, Debug, PartialEq)]
pub enum CakeMessage<'a> {
    Hello,
    WorkerInfo(CakeWorkerInfo<'a>),
    SingleOp {
        x: CakeTensor<'a>,
        op: CakeOp<'a>,
    },
    /// Runs the layers of `ops` on `x`, one after the other.
    Batch {
        x: CakeTensor<'a>,
        ops: Vec<CakeOp<'a>>,
    },
    Tensor(CakeTensor<'a>),
    Goodbye,
    LayerAssignment {
        layers: Vec<&'a str>,
        model_hash: &'a str,
    },
    LayerAssignmentAck {
        needs_data: bool,
    },
    ModelDataChunk(CakeChunk<'a>),
    ModelDataDone,
    /// Not in [`CakeVariant::Older`]. Never sent.
    ModelDataResume {
        file: &'a str,
        offset: u64,
    },
    WorkerReady,
    WorkerError {
        message: &'a str,
    },
}

/// For people, except for `dtype`: the type of the activations that the worker computes with.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeWorkerInfo<'a> {
    pub version: &'a str,
    pub dtype: &'a str,
    pub os: &'a str,
    pub arch: &'a str,
    pub device: &'a str,
    pub device_index: u64,
    /// How long the worker waited for the hello.
    pub latency_ms: u128,
}

/// A layer to run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeOp<'a> {
    pub layer: &'a str,
    /// The position of the first row: the number of tokens that were run before.
    pub position: u64,
    /// The number of the layer in the model.
    pub block: u64,
}

/// A piece of a file. Pieces of a file follow one another without a gap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeChunk<'a> {
    pub file: &'a str,
    /// In bytes of the file, as is `total_bytes`.
    pub offset: u64,
    pub total_bytes: u64,
    /// Not in [`CakeVariant::Older`].
    pub check: Option<CakeChunkCheck>,
    pub data: &'a [u8],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CakeChunkCheck {
    /// Whether the data is a zstd frame.
    pub is_compressed: bool,
    /// CRC-32 of the data as sent.
    pub crc: u32,
}

/// The numbers of messages.
mod number {
    pub const HELLO: u32 = 0;
    pub const WORKER_INFO: u32 = 1;
    pub const SINGLE_OP: u32 = 2;
    pub const BATCH: u32 = 3;
    pub const TENSOR: u32 = 4;
    pub const GOODBYE: u32 = 5;
    pub const LAYER_ASSIGNMENT: u32 = 6;
    pub const LAYER_ASSIGNMENT_ACK: u32 = 7;
    pub const MODEL_DATA_CHUNK: u32 = 8;
    pub const MODEL_DATA_DONE: u32 = 9;
    pub const MODEL_DATA_RESUME: u32 = 10;
    pub const READY: u32 = 11;
    pub const ERROR: u32 = 12;
    pub const OLDER_READY: u32 = 10;
    pub const OLDER_ERROR: u32 = 11;
}

impl CakeVariant {
    /// The variant in which a message was written, if its form tells.
    pub fn of(payload: &[u8]) -> Option<Self> {
        let mut reader = Reader::new(payload);
        let number = reader.u32("number").ok()?;
        let is_empty = reader.rest().is_empty();
        match number {
            number::MODEL_DATA_CHUNK => Self::of_chunk(&mut reader),
            number::OLDER_READY => Some(if is_empty { Self::Older } else { Self::Head }),
            number::READY => Some(if is_empty { Self::Head } else { Self::Older }),
            number::ERROR => Some(Self::Head),
            _ => None,
        }
    }

    /// In which variant the data of a chunk would end with the payload. Where both would, the checksum decides.
    fn of_chunk(reader: &mut Reader<'_>) -> Option<Self> {
        reader.text("file name").ok()?;
        reader.array::<16>("offset").ok()?;
        let ends = |mut reader: Reader<'_>| reader.bytes("data").is_ok_and(|_| reader.rest().is_empty());
        let is_older = ends(Reader::new(reader.rest()));
        let check = CakeChunkCheck::read(reader);
        match (check, is_older) {
            (Ok(check), true) if ends(Reader::new(reader.rest())) => {
                let data = Reader::new(reader.rest()).bytes("data").ok()?;
                Some(if crc32fast::hash(data) == check.crc { Self::Head } else { Self::Older })
            }
            (_, true) => Some(Self::Older),
            (_, false) => Some(Self::Head),
        }
    }
}

impl CakeChunkCheck {
    fn read(reader: &mut Reader<'_>) -> Result<Self, CakeWireError> {
        Ok(Self { is_compressed: reader.bool("compression flag")?, crc: reader.u32("checksum")? })
    }
}

impl<'a> CakeMessage<'a> {
    pub fn decode(payload: &'a [u8], variant: CakeVariant) -> Result<Self, CakeWireError> {
        let reader = &mut Reader::new(payload);
        Ok(match (reader.u32("number")?, variant) {
            (number::HELLO, _) => Self::Hello,
            (number::WORKER_INFO, _) => Self::WorkerInfo(CakeWorkerInfo::read(reader)?),
            (number::SINGLE_OP, _) => {
                let layer = reader.text("layer name")?;
                let x = CakeTensor::read(reader)?;
                let (position, block) = (reader.u64("position")?, reader.u64("block")?);
                Self::SingleOp { x, op: CakeOp { layer, position, block } }
            }
            (number::BATCH, _) => {
                let x = CakeTensor::read(reader)?;
                let count = reader.count("layers", OP_BYTES_MIN, LAYERS_MAX)?;
                Self::Batch { x, ops: (0..count).map(|_| CakeOp::read(reader)).collect::<Result<_, _>>()? }
            }
            (number::TENSOR, _) => Self::Tensor(CakeTensor::read(reader)?),
            (number::GOODBYE, _) => Self::Goodbye,
            (number::LAYER_ASSIGNMENT, _) => {
                let count = reader.count("layers", TEXT_BYTES_MIN, LAYERS_MAX)?;
                let layers = (0..count).map(|_| reader.text("layer name")).collect::<Result<_, _>>()?;
                Self::LayerAssignment { layers, model_hash: reader.text("model hash")? }
            }
            (number::LAYER_ASSIGNMENT_ACK, _) => Self::LayerAssignmentAck { needs_data: reader.bool("flag")? },
            (number::MODEL_DATA_CHUNK, variant) => Self::ModelDataChunk(CakeChunk::read(reader, variant)?),
            (number::MODEL_DATA_DONE, _) => Self::ModelDataDone,
            (number::MODEL_DATA_RESUME, CakeVariant::Head) => {
                Self::ModelDataResume { file: reader.text("file name")?, offset: reader.u64("offset")? }
            }
            (number::READY, CakeVariant::Head) | (number::OLDER_READY, CakeVariant::Older) => Self::WorkerReady,
            (number::ERROR, CakeVariant::Head) | (number::OLDER_ERROR, CakeVariant::Older) => {
                Self::WorkerError { message: reader.text("error message")? }
            }
            (other, _) => return Err(CakeWireError::UnknownMessage(other)),
        })
    }

    /// The whole frame.
    pub fn encode(&self, variant: CakeVariant) -> Result<Vec<u8>, CakeWireError> {
        let number = self.number(variant)?;
        frame(|out| {
            put_u32(out, number);
            match self {
                Self::Hello | Self::Goodbye | Self::ModelDataDone | Self::WorkerReady => {}
                Self::WorkerInfo(info) => info.write(out),
                Self::SingleOp { x, op } => {
                    put_bytes(out, op.layer.as_bytes());
                    x.write(out);
                    put_u64(out, op.position);
                    put_u64(out, op.block);
                }
                Self::Batch { x, ops } => {
                    x.write(out);
                    put_count(out, ops.len());
                    ops.iter().for_each(|op| op.write(out));
                }
                Self::Tensor(tensor) => tensor.write(out),
                Self::LayerAssignment { layers, model_hash } => {
                    put_count(out, layers.len());
                    layers.iter().for_each(|layer| put_bytes(out, layer.as_bytes()));
                    put_bytes(out, model_hash.as_bytes());
                }
                Self::LayerAssignmentAck { needs_data } => out.push(u8::from(*needs_data)),
                Self::ModelDataChunk(chunk) => chunk.write(out),
                Self::ModelDataResume { file, offset } => {
                    put_bytes(out, file.as_bytes());
                    put_u64(out, *offset);
                }
                Self::WorkerError { message } => put_bytes(out, message.as_bytes()),
            }
        })
    }

    fn number(&self, variant: CakeVariant) -> Result<u32, CakeWireError> {
        let is_older = variant == CakeVariant::Older;
        Ok(match self {
            Self::Hello => number::HELLO,
            Self::WorkerInfo(_) => number::WORKER_INFO,
            Self::SingleOp { .. } => number::SINGLE_OP,
            Self::Batch { .. } => number::BATCH,
            Self::Tensor(_) => number::TENSOR,
            Self::Goodbye => number::GOODBYE,
            Self::LayerAssignment { .. } => number::LAYER_ASSIGNMENT,
            Self::LayerAssignmentAck { .. } => number::LAYER_ASSIGNMENT_ACK,
            Self::ModelDataChunk(chunk) if chunk.check.is_none() == is_older => number::MODEL_DATA_CHUNK,
            Self::ModelDataDone => number::MODEL_DATA_DONE,
            Self::ModelDataResume { .. } if !is_older => number::MODEL_DATA_RESUME,
            Self::WorkerReady if is_older => number::OLDER_READY,
            Self::WorkerReady => number::READY,
            Self::WorkerError { .. } if is_older => number::OLDER_ERROR,
            Self::WorkerError { .. } => number::ERROR,
            Self::ModelDataChunk(_) | Self::ModelDataResume { .. } => return Err(CakeWireError::NotInVariant),
        })
    }
}

impl<'a> CakeWorkerInfo<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, CakeWireError> {
        Ok(Self {
            version: reader.text("version")?,
            dtype: reader.text("element type")?,
            os: reader.text("operating system")?,
            arch: reader.text("architecture")?,
            device: reader.text("device")?,
            device_index: reader.u64("device index")?,
            latency_ms: reader.u128("latency")?,
        })
    }

    fn write(&self, out: &mut Vec<u8>) {
        for text in [self.version, self.dtype, self.os, self.arch, self.device] {
            put_bytes(out, text.as_bytes());
        }
        put_u64(out, self.device_index);
        out.extend_from_slice(&self.latency_ms.to_be_bytes());
    }
}

impl<'a> CakeOp<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, CakeWireError> {
        let layer = reader.text("layer name")?;
        Ok(Self { layer, position: reader.u64("position")?, block: reader.u64("block")? })
    }

    fn write(&self, out: &mut Vec<u8>) {
        put_bytes(out, self.layer.as_bytes());
        put_u64(out, self.position);
        put_u64(out, self.block);
    }
}

impl<'a> CakeChunk<'a> {
    fn read(reader: &mut Reader<'a>, variant: CakeVariant) -> Result<Self, CakeWireError> {
        let file = reader.text("file name")?;
        let (offset, total_bytes) = (reader.u64("offset")?, reader.u64("file size")?);
        let check = (variant == CakeVariant::Head).then(|| CakeChunkCheck::read(reader)).transpose()?;
        Ok(Self { file, offset, total_bytes, check, data: reader.bytes("data")? })
    }

    fn write(&self, out: &mut Vec<u8>) {
        put_bytes(out, self.file.as_bytes());
        put_u64(out, self.offset);
        put_u64(out, self.total_bytes);
        if let Some(check) = self.check {
            out.push(u8::from(check.is_compressed));
            put_u32(out, check.crc);
        }
        out.reserve(TEXT_BYTES_MIN + self.data.len());
        put_bytes(out, self.data);
    }
}

fn put_u32(out: &mut Vec<u8>, value: u32) {
    out.extend_from_slice(&value.to_be_bytes());
}

fn put_u64(out: &mut Vec<u8>, value: u64) {
    out.extend_from_slice(&value.to_be_bytes());
}
