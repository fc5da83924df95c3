//! The values of records: dictionaries of what many peers wrote under one key, and what KwaaiNet's peers write there.

use types::LayerRange;

use crate::KwaaiWireError;
use crate::msgpack::{
    Reader, put_array, put_bin, put_bool, put_extension, put_f64, put_int, put_map, put_optional, put_text, put_uint,
};

/// A peer with an older version is ignored by KwaaiNet's.
pub const SERVER_VERSION_MIN: [u32; 3] = [0, 3, 15];

const TUPLE: i8 = 0x40;
const DICTIONARY: i8 = 0x50;
/// The shortest entry of a dictionary: an array of an empty text, an empty binary, and a small integer.
const ENTRY_BYTES_MIN: usize = 5;
const MODEL_FIELDS: [&str; 2] = ["repository", "num_blocks"];
const SERVER_FIELDS: [&str; 9] = [
    "start_block",
    "end_block",
    "public_name",
    "version",
    "torch_dtype",
    "using_relay",
    "cache_tokens_left",
    "peer_id",
    "lease_v1",
];

/// How a model's keys begin: the last part of its name at Hugging Face, with dashes for dots.
pub fn model_prefix(repository: &str) -> String {
    repository.rsplit('/').next().unwrap_or(repository).replace('.', "-")
}

/// The key under which the peers are listed that serve a block.
pub fn block_key(prefix: &str, block: u32) -> String {
    format!("{prefix}.{block}")
}

/// What peers wrote under one key, each under a subkey.
#[derive(Clone, Debug, PartialEq)]
pub struct DhtDictionary<'a> {
    pub entries_max: Option<u64>,
    pub latest_expiration: f64,
    pub entries: Vec<DhtEntry<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DhtEntry<'a> {
    pub subkey: &'a str,
    /// MessagePack.
    pub value: &'a [u8],
    pub expires_at: f64,
}

impl<'a> DhtDictionary<'a> {
    /// Entries that have another form are left out: one peer's must not hide those of others.
    pub fn decode(value: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let mut reader = Reader::new(value).extension(DICTIONARY, "dictionary")?;
        let found = reader.array("dictionary")?;
        if found != 3 {
            return Err(KwaaiWireError::Count { what: "parts of a dictionary", found, expected: 3 });
        }
        let entries_max = if reader.is_nil() { None } else { Some(reader.u64("size of a dictionary")?) };
        let latest_expiration = reader.f64("expiration")?;
        let count = reader.array("entries")?;
        let mut entries = Vec::with_capacity(count.min(reader.rest().len() / ENTRY_BYTES_MIN));
        for _ in 0..count {
            let entry = DhtEntry::read(&mut { reader });
            reader.skip("entries")?;
            entries.extend(entry);
        }
        Ok(Self { entries_max, latest_expiration, entries })
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        put_array(&mut data, 3);
        put_optional(&mut data, self.entries_max, put_uint);
        put_f64(&mut data, self.latest_expiration);
        put_array(&mut data, self.entries.len());
        for entry in &self.entries {
            put_array(&mut data, 3);
            put_text(&mut data, entry.subkey);
            put_bin(&mut data, entry.value);
            put_f64(&mut data, entry.expires_at);
        }
        let mut out = Vec::with_capacity(data.len() + 6);
        put_extension(&mut out, DICTIONARY, &data);
        out
    }
}

impl<'a> DhtEntry<'a> {
    fn read(reader: &mut Reader<'a>) -> Result<Self, KwaaiWireError> {
        let found = reader.array("entry")?;
        if found != 3 {
            return Err(KwaaiWireError::Count { what: "parts of an entry", found, expected: 3 });
        }
        Ok(Self { subkey: reader.text("subkey")?, value: reader.bin("value")?, expires_at: reader.f64("expiration")? })
    }
}

/// A model that peers serve.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KwaaiModelInfo<'a> {
    pub repository: &'a str,
    pub blocks: u32,
}

impl<'a> KwaaiModelInfo<'a> {
    pub fn decode(value: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut repository, mut blocks) = (None, None);
        Reader::new(value).fields(&MODEL_FIELDS, "model", |field, reader| {
            match field {
                0 => repository = Some(reader.text("repository")?),
                _ => blocks = Some(reader.u32("number of blocks")?),
            }
            Ok(())
        })?;
        Ok(Self {
            repository: repository.ok_or(KwaaiWireError::Missing("repository"))?,
            blocks: blocks.ok_or(KwaaiWireError::Missing("number of blocks"))?,
        })
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        put_map(&mut out, MODEL_FIELDS.len());
        put_text(&mut out, MODEL_FIELDS[0]);
        put_text(&mut out, self.repository);
        put_text(&mut out, MODEL_FIELDS[1]);
        put_uint(&mut out, self.blocks.into());
        out
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KwaaiServerState {
    Offline,
    Joining,
    Ready,
    Other(i64),
}

impl KwaaiServerState {
    fn of(number: i64) -> Self {
        match number {
            -1 => Self::Offline,
            0 => Self::Joining,
            2 => Self::Ready,
            other => Self::Other(other),
        }
    }

    fn number(self) -> i64 {
        match self {
            Self::Offline => -1,
            Self::Joining => 0,
            Self::Ready => 2,
            Self::Other(number) => number,
        }
    }
}

/// What a peer claims about itself. Nothing of it is verified.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KwaaiServerInfo<'a> {
    pub state: KwaaiServerState,
    /// Tokens per second. Finite.
    pub throughput: f64,
    pub blocks: LayerRange,
    pub public_name: Option<&'a str>,
    /// `kwaai-X.Y.Z`.
    pub version: Option<&'a str>,
    /// The type that the peer computes with, such as `float16`.
    pub dtype: Option<&'a str>,
    pub using_relay: bool,
    pub cache_tokens_left: Option<u64>,
    /// In base 58.
    pub peer: Option<&'a str>,
    pub lease_v1: bool,
}

impl<'a> KwaaiServerInfo<'a> {
    pub fn decode(value: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let mut reader = Reader::new(value).extension(TUPLE, "server")?;
        let found = reader.array("server")?;
        if found < 3 {
            return Err(KwaaiWireError::Count { what: "parts of a server", found, expected: 3 });
        }
        let state = KwaaiServerState::of(reader.i64("state")?);
        let throughput = reader.f64("throughput")?;
        if !throughput.is_finite() {
            return Err(KwaaiWireError::OutOfRange("throughput"));
        }
        let mut info = Self {
            state,
            throughput,
            blocks: read_blocks(&mut { reader })?,
            public_name: None,
            version: None,
            dtype: None,
            using_relay: false,
            cache_tokens_left: None,
            peer: None,
            lease_v1: false,
        };
        reader.fields(&SERVER_FIELDS, "server", |field, reader| {
            match field {
                _ if reader.is_nil() => {}
                0 | 1 => reader.skip("blocks")?,
                2 => info.public_name = Some(reader.text("name")?),
                3 => info.version = Some(reader.text("version")?),
                4 => info.dtype = Some(reader.text("element type")?),
                5 => info.using_relay = reader.bool("flag")?,
                6 => info.cache_tokens_left = Some(reader.u64("tokens left")?),
                7 => info.peer = Some(reader.text("peer id")?),
                _ => info.lease_v1 = reader.bool("flag")?,
            }
            Ok(())
        })?;
        Ok(info)
    }

    pub fn encode(&self) -> Vec<u8> {
        let mut data = Vec::new();
        put_array(&mut data, 3);
        put_int(&mut data, self.state.number());
        put_f64(&mut data, self.throughput);
        // In KwaaiNet's order, with two empty fields that it also writes.
        let [start, end, name, version, dtype, relay, cache, peer, lease] = SERVER_FIELDS;
        put_map(&mut data, SERVER_FIELDS.len() + 2);
        put_text(&mut data, start);
        put_uint(&mut data, self.blocks.start() as u64);
        put_text(&mut data, end);
        put_uint(&mut data, self.blocks.end() as u64);
        for (field, text) in [(name, self.public_name), (version, self.version), (dtype, self.dtype)] {
            put_text(&mut data, field);
            put_optional(&mut data, text, put_text);
        }
        put_text(&mut data, relay);
        put_bool(&mut data, self.using_relay);
        put_text(&mut data, cache);
        put_optional(&mut data, self.cache_tokens_left, put_uint);
        put_text(&mut data, "adapters");
        put_array(&mut data, 0);
        put_text(&mut data, "next_pings");
        put_map(&mut data, 0);
        put_text(&mut data, peer);
        put_optional(&mut data, self.peer, put_text);
        put_text(&mut data, lease);
        put_bool(&mut data, self.lease_v1);
        let mut out = Vec::with_capacity(data.len() + 6);
        put_extension(&mut out, TUPLE, &data);
        out
    }

    /// Whether KwaaiNet's coordinators would use the peer: it is ready, and its version is new enough.
    pub fn is_usable(&self) -> bool {
        let version = self.version.and_then(version_numbers);
        self.state == KwaaiServerState::Ready && version.is_some_and(|version| version >= SERVER_VERSION_MIN)
    }
}

/// The first two fields of a server.
fn read_blocks(reader: &mut Reader<'_>) -> Result<LayerRange, KwaaiWireError> {
    let mut range = [None; 2];
    reader.fields(&SERVER_FIELDS[..2], "server", |field, reader| {
        range[field] = Some(reader.u32("blocks")?);
        Ok(())
    })?;
    let [Some(start), Some(end)] = range else { return Err(KwaaiWireError::Missing("blocks")) };
    LayerRange::new(start, end).ok_or(KwaaiWireError::OutOfRange("blocks"))
}

/// The numbers of `kwaai-X.Y.Z`.
fn version_numbers(version: &str) -> Option<[u32; 3]> {
    let mut numbers = version.strip_prefix("kwaai-")?.split('.').map(|number| number.parse().ok());
    let version = [numbers.next()??, numbers.next()??, numbers.next()??];
    numbers.next().is_none().then_some(version)
}
