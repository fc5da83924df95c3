//! The header of one GGUF file: its metadata and the locations of its tensors.

use types::DType;

use super::cursor::Cursor;
use super::value::{Value, ValueReader};
use crate::files::FormatError;
use crate::files::error::shown;
use crate::files::tensors::{RANK_MAX, Shape, TENSORS_MAX, Tensor, check_disjoint, stored_bytes};

/// The most metadata entries of a file; real files have some dozens.
const KEYS_MAX: usize = 1 << 16;
/// The alignment of tensors if the file does not specify one.
const ALIGNMENT_DEFAULT: u64 = 32;

/// One file's header. The tensors are in bounds and do not overlap; their names may repeat.
pub struct Header {
    pub metadata: Metadata,
    pub tensors: Vec<Tensor<DType>>,
}

/// Sorted by key, without duplicates.
pub struct Metadata(Vec<(Box<str>, Value)>);

impl Metadata {
    pub fn get(&self, key: &str) -> Option<&Value> {
        let at = self.0.binary_search_by(|(other, _)| (**other).cmp(key)).ok()?;
        Some(&self.0[at].1)
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&str, &Value)> {
        self.0.iter().map(|(key, value)| (&**key, value))
    }

    fn read(cursor: &mut Cursor<'_>, count: usize) -> Result<Self, FormatError> {
        let mut entries: Vec<(Box<str>, Value)> = Vec::with_capacity(count);
        let mut values = ValueReader::new();
        for _ in 0..count {
            let key = cursor.name("a metadata key")?;
            entries.push((key.into(), values.read(cursor, key)?));
        }
        entries.sort_unstable_by(|(a, _), (b, _)| a.cmp(b));
        match entries.windows(2).find(|pair| pair[0].0 == pair[1].0) {
            Some(pair) => Err(FormatError::Duplicate { what: "metadata values", name: shown(&pair[0].0) }),
            None => Ok(Self(entries)),
        }
    }
}

impl Header {
    /// Reads the header of `bytes`, the whole file number `file` of its model.
    pub fn read(bytes: &[u8], file: u32) -> Result<Self, FormatError> {
        /// The shortest key, type and value; the shortest name, rank, type and offset.
        const KEY_BYTES_MIN: usize = 8 + 4 + 1;
        const TENSOR_BYTES_MIN: usize = 8 + 4 + 4 + 8;
        let mut cursor = Cursor::new(bytes);
        if cursor.array("the magic number").map_err(|_| FormatError::Magic)? != *b"GGUF" {
            return Err(FormatError::Magic);
        }
        match cursor.u32("the version")? {
            2 | 3 => {}
            version if matches!(version.swap_bytes(), 1..=3) => return Err(FormatError::BigEndian),
            version => return Err(FormatError::Version(version)),
        }
        let tensor_count = cursor.count(TENSOR_BYTES_MIN, TENSORS_MAX, "tensors")?;
        let key_count = cursor.count(KEY_BYTES_MIN, KEYS_MAX, "metadata values")?;
        let metadata = Metadata::read(&mut cursor, key_count)?;
        let alignment = alignment(&metadata)?;

        let mut tensors = Vec::with_capacity(tensor_count);
        for _ in 0..tensor_count {
            tensors.push(tensor(&mut cursor, alignment, file)?);
        }
        let data = (cursor.at() as u64).checked_next_multiple_of(alignment).ok_or(FormatError::Alignment(alignment))?;
        for tensor in &mut tensors {
            place(tensor, data, bytes.len())?;
        }
        check_disjoint(&mut tensors)?;
        Ok(Self { metadata, tensors })
    }
}

fn alignment(metadata: &Metadata) -> Result<u64, FormatError> {
    const KEY: &str = "general.alignment";
    match metadata.get(KEY) {
        None => Ok(ALIGNMENT_DEFAULT),
        Some(value) => match value.as_u64() {
            Some(alignment) if alignment.is_power_of_two() => Ok(alignment),
            Some(alignment) => Err(FormatError::Alignment(alignment)),
            None => Err(FormatError::ValueRange { key: KEY.to_owned() }),
        },
    }
}

/// Reads an entry of the tensor list. Its range is relative to the start of the data.
fn tensor(cursor: &mut Cursor<'_>, alignment: u64, file: u32) -> Result<Tensor<DType>, FormatError> {
    const WHAT: &str = "the list of tensors";
    let name = cursor.name("the name of a tensor")?;
    let rank = cursor.u32(WHAT)?;
    if rank as usize > RANK_MAX {
        return Err(FormatError::Rank { tensor: shown(name), rank, max: RANK_MAX });
    }
    let mut shape = Shape::default();
    for _ in 0..rank {
        // Saturates: a dimension that does not fit in usize is handled like usize::MAX.
        let dim = usize::try_from(cursor.u64(WHAT)?).unwrap_or(usize::MAX);
        shape.push(dim).expect("the rank is within the limit");
    }
    shape.reverse();
    let code = cursor.u32(WHAT)?;
    let dtype = dtype(code).ok_or_else(|| FormatError::TensorType { tensor: shown(name), code })?;
    let offset = cursor.u64(WHAT)?;
    if !offset.is_multiple_of(alignment) {
        return Err(FormatError::Misaligned { tensor: shown(name), offset, alignment });
    }
    let bytes = stored_bytes(dtype, shape.dims())
        .ok_or_else(|| FormatError::Shape { tensor: shown(name), shape: shape.dims().to_vec() })?;
    let out_of_bounds = || FormatError::OutOfBounds { tensor: shown(name) };
    let start = usize::try_from(offset).map_err(|_| out_of_bounds())?;
    let end = start.checked_add(bytes).ok_or_else(out_of_bounds)?;
    Ok(Tensor { name: name.into(), dtype, shape, file, range: start..end })
}

/// Makes a tensor's range relative to the start of the file, and checks it against `file_bytes`.
fn place(tensor: &mut Tensor<DType>, data: u64, file_bytes: usize) -> Result<(), FormatError> {
    let moved = |at: usize| usize::try_from(data).ok()?.checked_add(at).filter(|&at| at <= file_bytes);
    match (moved(tensor.range.start), moved(tensor.range.end)) {
        (Some(start), Some(end)) => tensor.range = start..end,
        _ => return Err(FormatError::OutOfBounds { tensor: shown(&tensor.name) }),
    }
    Ok(())
}

/// The format of a GGML type number.
fn dtype(code: u32) -> Option<DType> {
    Some(match code {
        0 => DType::F32,
        1 => DType::F16,
        2 => DType::Q4_0,
        3 => DType::Q4_1,
        6 => DType::Q5_0,
        7 => DType::Q5_1,
        8 => DType::Q8_0,
        10 => DType::Q2_K,
        11 => DType::Q3_K,
        12 => DType::Q4_K,
        13 => DType::Q5_K,
        14 => DType::Q6_K,
        30 => DType::BF16,
        _ => return None,
    })
}
