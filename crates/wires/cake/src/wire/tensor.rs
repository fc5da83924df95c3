//! `CakeTensor`: a tensor as it travels. Its bytes always fit its shape and element type.

use std::fmt;

use super::CakeWireError;
use super::reader::{Reader, put_bytes, put_count};

/// Dimensions of the largest tensor; activations have three.
const RANK_MAX: usize = 8;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CakeDType {
    U8,
    U32,
    I64,
    Bf16,
    F16,
    F32,
    F64,
    F8E4M3,
}

impl CakeDType {
    /// In the order of their numbers on the wire.
    pub const ALL: [Self; 8] =
        [Self::U8, Self::U32, Self::I64, Self::Bf16, Self::F16, Self::F32, Self::F64, Self::F8E4M3];

    pub fn bytes(self) -> usize {
        match self {
            Self::U8 | Self::F8E4M3 => 1,
            Self::Bf16 | Self::F16 => 2,
            Self::U32 | Self::F32 => 4,
            Self::I64 | Self::F64 => 8,
        }
    }

    /// The name in [`CakeWorkerInfo`](super::CakeWorkerInfo).
    pub fn name(self) -> &'static str {
        match self {
            Self::U8 => "U8",
            Self::U32 => "U32",
            Self::I64 => "I64",
            Self::Bf16 => "BF16",
            Self::F16 => "F16",
            Self::F32 => "F32",
            Self::F64 => "F64",
            Self::F8E4M3 => "F8E4M3",
        }
    }

    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|dtype| dtype.name().eq_ignore_ascii_case(name))
    }

    fn number(self) -> u8 {
        Self::ALL.iter().position(|&dtype| dtype == self).map_or(u8::MAX, |index| index as u8)
    }
}

impl fmt::Display for CakeDType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Row-major, contiguous, little-endian.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CakeTensor<'a> {
    data: &'a [u8],
    dtype: CakeDType,
    shape: Vec<u64>,
}

impl<'a> CakeTensor<'a> {
    pub fn new(data: &'a [u8], dtype: CakeDType, shape: Vec<u64>) -> Result<Self, CakeWireError> {
        if shape.len() > RANK_MAX {
            return Err(CakeWireError::TooMany { what: "dimensions", found: shape.len(), max: RANK_MAX });
        }
        let bytes = shape.iter().try_fold(dtype.bytes() as u64, |bytes, &dim| bytes.checked_mul(dim));
        if bytes != Some(data.len() as u64) {
            return Err(CakeWireError::TensorBytes { dtype, shape, bytes: data.len() });
        }
        Ok(Self { data, dtype, shape })
    }

    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    pub fn dtype(&self) -> CakeDType {
        self.dtype
    }

    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    pub(super) fn read(reader: &mut Reader<'a>) -> Result<Self, CakeWireError> {
        let data = reader.bytes("tensor data")?;
        let number = reader.u8("element type")?;
        let dtype = CakeDType::ALL.get(usize::from(number)).ok_or(CakeWireError::UnknownDType(number))?;
        let rank = reader.count("dimensions", 8, RANK_MAX)?;
        let shape = (0..rank).map(|_| reader.u64("dimensions")).collect::<Result<_, _>>()?;
        Self::new(data, *dtype, shape)
    }

    pub(super) fn write(&self, out: &mut Vec<u8>) {
        put_bytes(out, self.data);
        out.push(self.dtype.number());
        put_count(out, self.shape.len());
        self.shape.iter().for_each(|dim| out.extend_from_slice(&dim.to_be_bytes()));
    }
}
