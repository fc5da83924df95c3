//! Writes small model files, well-formed or not: the caller sets every field. The seeds of the fuzz targets are also written
//! with it.

/// Builds a GGUF file. Type codes, dimensions (innermost first) and offsets are written as given.
#[derive(Clone)]
pub struct GgufWriter {
    pub magic: [u8; 4],
    pub version: u32,
    /// The counts in the header; by default the correct ones.
    pub tensor_count: Option<u64>,
    pub key_count: Option<u64>,
    pub alignment: usize,
    pub keys: Vec<Vec<u8>>,
    pub tensors: Vec<Vec<u8>>,
    pub data: Vec<u8>,
}

impl Default for GgufWriter {
    fn default() -> Self {
        Self {
            magic: *b"GGUF",
            version: 3,
            tensor_count: None,
            key_count: None,
            alignment: 32,
            keys: vec![],
            tensors: vec![],
            data: vec![],
        }
    }
}

impl GgufWriter {
    pub fn key(mut self, key: &[u8], code: u32, value: &[u8]) -> Self {
        self.keys.push([&string(key), &code.to_le_bytes()[..], value].concat());
        self
    }

    /// Adds an entry to the tensor list only.
    pub fn entry(mut self, name: &[u8], dims: &[u64], code: u32, offset: u64) -> Self {
        let dims_bytes: Vec<u8> = dims.iter().flat_map(|dim| dim.to_le_bytes()).collect();
        let rank = (dims.len() as u32).to_le_bytes();
        self.tensors.push([&string(name), &rank[..], &dims_bytes, &code.to_le_bytes(), &offset.to_le_bytes()].concat());
        self
    }

    /// Adds a tensor with its data at the next aligned offset.
    pub fn tensor(mut self, name: &[u8], dims: &[u64], code: u32, data: &[u8]) -> Self {
        self.data.resize(self.data.len().next_multiple_of(self.alignment), 0);
        let offset = self.data.len() as u64;
        self.data.extend_from_slice(data);
        self.entry(name, dims, code, offset)
    }

    pub fn data(mut self, data: &[u8]) -> Self {
        self.data.extend_from_slice(data);
        self
    }

    pub fn bytes(&self) -> Vec<u8> {
        let mut bytes = self.magic.to_vec();
        bytes.extend(self.version.to_le_bytes());
        bytes.extend(self.tensor_count.unwrap_or(self.tensors.len() as u64).to_le_bytes());
        bytes.extend(self.key_count.unwrap_or(self.keys.len() as u64).to_le_bytes());
        bytes.extend(self.keys.concat());
        bytes.extend(self.tensors.concat());
        bytes.resize(bytes.len().next_multiple_of(self.alignment), 0);
        bytes.extend_from_slice(&self.data);
        bytes
    }
}

pub fn string(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// An array value: the type code of its entries, their count as written in the file, and their bytes.
pub fn array(code: u32, count: u64, entries: &[u8]) -> Vec<u8> {
    [&code.to_le_bytes()[..], &count.to_le_bytes(), entries].concat()
}

/// A GGUF file with a value of every type and tensors of several.
pub fn gguf_sample() -> GgufWriter {
    GgufWriter::default()
        .key(b"u8", 0, &[200])
        .key(b"i8", 1, &(-3i8).to_le_bytes())
        .key(b"u16", 2, &60_000u16.to_le_bytes())
        .key(b"i16", 3, &(-300i16).to_le_bytes())
        .key(b"u32", 4, &4_000_000_000u32.to_le_bytes())
        .key(b"i32", 5, &(-70_000i32).to_le_bytes())
        .key(b"f32", 6, &1.5f32.to_le_bytes())
        .key(b"bool", 7, &[1])
        .key(b"general.architecture", 8, &string("llama ✓".as_bytes()))
        .key(b"general.alignment", 4, &32u32.to_le_bytes())
        .key(b"u64", 10, &u64::MAX.to_le_bytes())
        .key(b"i64", 11, &i64::MIN.to_le_bytes())
        .key(b"f64", 12, &0.1f64.to_le_bytes())
        .key(b"tokens", 9, &array(8, 3, &[string(b"a"), string(b""), string("ß".as_bytes())].concat()))
        .key(b"types", 9, &array(5, 2, &[1i32.to_le_bytes(), (-2i32).to_le_bytes()].concat()))
        .key(b"scores", 9, &array(6, 2, &[0.5f32.to_le_bytes(), (-1f32).to_le_bytes()].concat()))
        .key(b"flags", 9, &array(7, 2, &[0, 1]))
        .tensor(b"token_embd.weight", &[2, 3], 0, &floats(6))
        .tensor(b"blk.0.attn_q.weight", &[32, 2], 8, &[7; 68])
        .tensor(b"blk.0.attn_norm.weight", &[5], 1, &[9; 10])
}

/// `0.0, 1.0, 2.0, …` as bytes.
pub fn floats(count: usize) -> Vec<u8> {
    (0..count).flat_map(|value| (value as f32).to_le_bytes()).collect()
}

/// A safetensors file with the given header.
pub fn safetensors(header: &str, data: &[u8]) -> Vec<u8> {
    [&(header.len() as u64).to_le_bytes(), header.as_bytes(), data].concat()
}

/// A safetensors file with metadata, padding, tensors of several formats and an empty one.
pub fn safetensors_sample() -> Vec<u8> {
    let header = r#"{"__metadata__":{"format":"pt"},
        "model.norm.weight":{"dtype":"F32","shape":[2,3],"data_offsets":[0,24]},
        "half":{"dtype":"F16","shape":[2],"data_offsets":[24,28]},
        "brain":{"dtype":"BF16","shape":[],"data_offsets":[28,30]},
        "scale":{"dtype":"F8_E4M3","shape":[3],"data_offsets":[30,33]},
        "none":{"dtype":"F32","shape":[0,4],"data_offsets":[33,33]}}     "#;
    safetensors(header, &[floats(6), vec![1; 9]].concat())
}
