//! `model.safetensors.index.json`: maps tensors to shard files.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Component, Path};

use serde::de::{Deserialize, Deserializer, Error, MapAccess, Visitor};

use crate::files::error::shown;
use crate::files::tensors::TENSORS_MAX;
use crate::files::{FileError, FormatError};

/// The most bytes of an index: some hundred thousand entries with the longest known names.
const INDEX_BYTES_MAX: u64 = 64 << 20;

pub struct Index {
    /// File names, without a path: shards are in the same folder as the index.
    pub shards: Vec<String>,
    /// Tensor names and the index of their shard, sorted by shard.
    pub tensors: Vec<(String, usize)>,
}

impl Index {
    pub fn read(path: &Path) -> Result<Self, FileError> {
        let json = read_bounded(path).map_err(|source| FileError::Io { path: path.to_owned(), source })?;
        let document: Document = serde_json::from_slice(&json)
            .map_err(|e| FileError::Format { path: path.to_owned(), source: FormatError::Header(e) })?;
        let WeightMap { shards, mut tensors } = document.weight_map;
        let mut names = vec![String::new(); shards.len()];
        for (name, shard) in shards {
            if !is_file_name(&name) {
                return Err(FileError::ShardName { index: path.to_owned(), shard: shown(&name) });
            }
            names[shard] = name;
        }
        tensors.sort_by_key(|&(_, shard)| shard);
        Ok(Self { shards: names, tensors })
    }

    /// The tensors that a shard must hold.
    pub fn tensors_of(&self, shard: usize) -> impl Iterator<Item = &str> {
        let start = self.tensors.partition_point(|&(_, other)| other < shard);
        self.tensors[start..].iter().take_while(move |&&(_, other)| other == shard).map(|(name, _)| &**name)
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut json = Vec::new();
    File::open(path)?.take(INDEX_BYTES_MAX + 1).read_to_end(&mut json)?;
    match json.len() as u64 > INDEX_BYTES_MAX {
        true => Err(io::Error::new(io::ErrorKind::FileTooLarge, "longer than any index")),
        false => Ok(json),
    }
}

/// True for a plain file name: no folder, no parent, and no character that another system treats as a separator.
fn is_file_name(name: &str) -> bool {
    let mut components = Path::new(name).components();
    matches!((components.next(), components.next()), (Some(Component::Normal(only)), None) if only == name)
        && !name.contains(['/', '\\', ':', '\0'])
}

#[derive(serde::Deserialize)]
struct Document {
    weight_map: WeightMap,
}

struct WeightMap {
    /// File name to shard number, numbered in the order of first occurrence.
    shards: BTreeMap<String, usize>,
    tensors: Vec<(String, usize)>,
}

impl<'de> Deserialize<'de> for WeightMap {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Members;
        impl<'de> Visitor<'de> for Members {
            type Value = WeightMap;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object from tensor to shard")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<WeightMap, A::Error> {
                let (mut shards, mut tensors) = (BTreeMap::new(), Vec::new());
                while let Some((tensor, shard)) = map.next_entry::<String, String>()? {
                    if tensors.len() == TENSORS_MAX {
                        return Err(A::Error::custom(format_args!("more than {TENSORS_MAX} tensors")));
                    }
                    let next = shards.len();
                    tensors.push((tensor, *shards.entry(shard).or_insert(next)));
                }
                Ok(WeightMap { shards, tensors })
            }
        }
        deserializer.deserialize_map(Members)
    }
}
