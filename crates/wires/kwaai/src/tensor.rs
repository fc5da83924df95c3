//! `KwaaiTensor`: hidden states and logits, row-major f16, and how many rows of them a frame can hold.

use std::borrow::Cow;

use half::f16;

use crate::KwaaiWireError;
use crate::frame::FRAME_BYTES_MAX;

/// Dimensions of the largest tensor; hidden states have three.
pub(crate) const RANK_MAX: usize = 8;
const VALUE_BYTES: usize = 2;
/// What a frame holds beside the data: 281 bytes at most, with a peer id of 127 bytes.
pub(crate) const FRAME_OVERHEAD_BYTES_MAX: usize = 512;

/// The two forms of data in MessagePack. We write the first; KwaaiNet reads both and writes the second.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DataForm {
    Bin,
    /// An integer for each byte, of one byte or of two.
    Integers,
}

/// How many rows of hidden states, of `hidden` values each, surely fit into a frame. A prompt that is longer has to be sent
/// in parts. KwaaiNet's servers answer in [`DataForm::Integers`], so that form bounds the rows that are sent to them, except
/// to the last one of a chain.
pub fn rows_per_frame(hidden: usize, form: DataForm) -> usize {
    let byte_bytes = match form {
        DataForm::Bin => 1,
        DataForm::Integers => 2,
    };
    let row_bytes = hidden.saturating_mul(VALUE_BYTES * byte_bytes);
    (FRAME_BYTES_MAX - FRAME_OVERHEAD_BYTES_MAX).checked_div(row_bytes).unwrap_or(0)
}

/// Its bytes always fit its shape.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KwaaiTensor<'a> {
    data: Cow<'a, [u8]>,
    shape: Vec<u32>,
}

impl<'a> KwaaiTensor<'a> {
    pub(crate) fn new(data: Cow<'a, [u8]>, shape: Vec<u32>) -> Result<Self, KwaaiWireError> {
        let bytes = shape.iter().try_fold(VALUE_BYTES as u64, |bytes, &dim| bytes.checked_mul(dim.into()));
        if bytes != Some(data.len() as u64) {
            return Err(KwaaiWireError::TensorBytes { shape, bytes: data.len() });
        }
        Ok(Self { data, shape })
    }

    /// The tensor `[1, rows, width]` of rows of hidden states or of logits, rounded to f16. All have to be finite, also after
    /// that.
    pub fn of_rows(values: &[f32], width: u32) -> Result<KwaaiTensor<'static>, KwaaiWireError> {
        let mut data = Vec::with_capacity(values.len() * VALUE_BYTES);
        for &value in values {
            let value = f16::from_f32(value);
            if !value.is_finite() {
                return Err(KwaaiWireError::NotFinite);
            }
            data.extend_from_slice(&value.to_le_bytes());
        }
        let rows = u32::try_from(values.len() / width.max(1) as usize).unwrap_or(u32::MAX);
        KwaaiTensor::new(Cow::Owned(data), vec![1, rows, width])
    }

    pub fn shape(&self) -> &[u32] {
        &self.shape
    }

    pub(crate) fn data(&self) -> &[u8] {
        &self.data
    }

    /// The hidden states of a tensor `[1, rows, hidden]`, of one row at least. All are finite: others would remain in the KV
    /// cache.
    pub fn hidden_rows(&self, hidden: usize) -> Result<Vec<f32>, KwaaiWireError> {
        if !matches!(*self.shape, [1, rows, width] if rows > 0 && width as usize == hidden) {
            return Err(KwaaiWireError::HiddenShape { hidden, shape: self.shape.clone() });
        }
        finite(&self.data)
    }

    /// The logits of the last position, of a tensor `[1, rows, vocab]` or `[vocab]`. All are finite.
    pub fn last_logits(&self, vocab: usize) -> Result<Vec<f32>, KwaaiWireError> {
        if !matches!(*self.shape, [1, (1..), width] | [width] if width as usize == vocab) {
            return Err(KwaaiWireError::LogitShape { vocab, shape: self.shape.clone() });
        }
        finite(&self.data[self.data.len() - vocab * VALUE_BYTES..])
    }
}

fn finite(data: &[u8]) -> Result<Vec<f32>, KwaaiWireError> {
    let (elements, _) = data.as_chunks();
    let mut values = Vec::with_capacity(elements.len());
    for &bytes in elements {
        let value = f16::from_le_bytes(bytes);
        if !value.is_finite() {
            return Err(KwaaiWireError::NotFinite);
        }
        values.push(value.to_f32());
    }
    Ok(values)
}
