//! The messages of two RPCs, store and find. Pings are between nodes of the DHT, of which we are none.

use super::DhtId;
use crate::KwaaiWireError;
use crate::msgpack::{Reader, put_nil, put_text};
use crate::protobuf::{Value, push, put_bytes, put_double, put_uint, read_fields};

/// Keys, records or results of one message. A model has a key for each of its blocks.
pub const DHT_KEYS_MAX: usize = 1024;
/// Nodes that one result names.
const NEAREST_MAX: usize = 1024;
const AUTH: u32 = 1;
const AUTH_TIME: u32 = 3;
const NODE_ID: u32 = 1;
/// The field of the sender's node in a store request; in all other messages it is [`NODE`].
const STORE_NODE: u32 = 7;
const NODE: u32 = 3;

/// What all messages may say of their sender. Nobody checks it.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct DhtSender {
    pub time: Option<f64>,
    pub node: Option<DhtId>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DhtStoreRequest<'a> {
    pub sender: DhtSender,
    pub records: Vec<DhtRecord<'a>>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DhtRecord<'a> {
    pub key: DhtId,
    pub subkey: DhtSubkey<'a>,
    /// MessagePack.
    pub value: &'a [u8],
    pub expires_at: f64,
    pub in_cache: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DhtSubkey<'a> {
    /// The key has a plain value.
    Plain,
    /// The key has a dictionary, and the value is all of it.
    Whole,
    /// The value is this entry of the key's dictionary.
    Entry(&'a str),
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DhtStoreResponse {
    pub sender: DhtSender,
    /// Whether each record was accepted.
    pub accepted: Vec<bool>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DhtFindRequest {
    pub sender: DhtSender,
    pub keys: Vec<DhtId>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub struct DhtFindResponse<'a> {
    pub sender: DhtSender,
    /// One for each key.
    pub results: Vec<DhtFindResult<'a>>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct DhtFindResult<'a> {
    pub found: DhtFound<'a>,
    /// Nodes that are near the key, with the bytes of their peer ids.
    pub nearest: Vec<(DhtId, &'a [u8])>,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum DhtFound<'a> {
    Nothing,
    Plain {
        value: &'a [u8],
        expires_at: f64,
    },
    /// The value is a [`DhtDictionary`](super::DhtDictionary).
    Dictionary {
        value: &'a [u8],
        expires_at: f64,
    },
}

/// Reads a message: its sender, whose node is in field `node`, and with `read` the other fields.
fn read_message<'a>(
    message: &'a [u8],
    what: &'static str,
    node: u32,
    mut read: impl FnMut(u32, Value<'a>) -> Result<(), KwaaiWireError>,
) -> Result<DhtSender, KwaaiWireError> {
    let mut sender = DhtSender::default();
    read_fields(message, what, |number, value| {
        if number == AUTH {
            read_fields(value.bytes("auth")?, "auth", |number, value| {
                if number == AUTH_TIME {
                    sender.time = Some(value.double("time")?);
                }
                Ok(())
            })
        } else if number == node {
            read_fields(value.bytes("node")?, "node", |number, value| {
                if number == NODE_ID {
                    sender.node = Some(DhtId::read(value.bytes("node id")?, "node id")?);
                }
                Ok(())
            })
        } else {
            read(number, value)
        }
    })?;
    Ok(sender)
}

/// Writes a message: its sender, and with `put` the other fields.
fn write_message(sender: &DhtSender, node: u32, put: impl FnOnce(&mut Vec<u8>)) -> Vec<u8> {
    let mut out = Vec::new();
    if let Some(time) = sender.time {
        let mut auth = Vec::new();
        put_double(&mut auth, AUTH_TIME, time);
        put_bytes(&mut out, AUTH, &auth);
    }
    put(&mut out);
    if let Some(id) = sender.node {
        let mut message = Vec::new();
        put_bytes(&mut message, NODE_ID, &id.0);
        put_bytes(&mut out, node, &message);
    }
    out
}

fn put_bools(out: &mut Vec<u8>, field: u32, values: impl Iterator<Item = bool>) {
    let packed: Vec<u8> = values.map(u8::from).collect();
    if !packed.is_empty() {
        put_bytes(out, field, &packed);
    }
}

impl<'a> DhtStoreRequest<'a> {
    pub fn decode(message: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut keys, mut subkeys, mut values) = (Vec::new(), Vec::new(), Vec::new());
        let (mut expirations, mut in_cache) = (Vec::new(), Vec::new());
        let sender = read_message(message, "store request", STORE_NODE, |number, value| {
            match number {
                2 => push(&mut keys, DhtId::read(value.bytes("key")?, "key")?, "keys", DHT_KEYS_MAX)?,
                3 => push(&mut subkeys, DhtSubkey::read(value.bytes("subkey")?)?, "subkeys", DHT_KEYS_MAX)?,
                4 => push(&mut values, value.bytes("value")?, "values", DHT_KEYS_MAX)?,
                5 => value.append_doubles(&mut expirations, "expirations", DHT_KEYS_MAX)?,
                6 => value.append_bools(&mut in_cache, "flags", DHT_KEYS_MAX)?,
                _ => {}
            }
            Ok(())
        })?;
        let expected = keys.len();
        if in_cache.is_empty() {
            in_cache.resize(expected, false);
        }
        let counts = [
            ("subkeys", subkeys.len()),
            ("values", values.len()),
            ("expirations", expirations.len()),
            ("flags", in_cache.len()),
        ];
        if let Some((what, found)) = counts.into_iter().find(|&(_, found)| found != expected) {
            return Err(KwaaiWireError::Count { what, found, expected });
        }
        let values = keys.into_iter().zip(subkeys).zip(values);
        let records = values.zip(expirations.into_iter().zip(in_cache));
        let records = records.map(|(((key, subkey), value), (expires_at, in_cache))| DhtRecord {
            key,
            subkey,
            value,
            expires_at,
            in_cache,
        });
        Ok(Self { sender, records: records.collect() })
    }

    pub fn encode(&self) -> Vec<u8> {
        write_message(&self.sender, STORE_NODE, |out| {
            self.records.iter().for_each(|record| put_bytes(out, 2, &record.key.0));
            self.records.iter().for_each(|record| put_bytes(out, 3, &record.subkey.encode()));
            self.records.iter().for_each(|record| put_bytes(out, 4, record.value));
            let expirations = self.records.iter().flat_map(|record| record.expires_at.to_le_bytes());
            let expirations: Vec<u8> = expirations.collect();
            if !expirations.is_empty() {
                put_bytes(out, 5, &expirations);
            }
            put_bools(out, 6, self.records.iter().map(|record| record.in_cache));
        })
    }
}

impl<'a> DhtSubkey<'a> {
    fn read(bytes: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let mut reader = Reader::new(bytes);
        if bytes.is_empty() {
            Ok(Self::Whole)
        } else if reader.is_nil() {
            Ok(Self::Plain)
        } else {
            reader.text("subkey").map(Self::Entry)
        }
    }

    fn encode(self) -> Vec<u8> {
        let mut out = Vec::new();
        match self {
            Self::Plain => put_nil(&mut out),
            Self::Whole => {}
            Self::Entry(subkey) => put_text(&mut out, subkey),
        }
        out
    }
}

impl DhtStoreResponse {
    pub fn decode(message: &[u8]) -> Result<Self, KwaaiWireError> {
        let mut accepted = Vec::new();
        let sender = read_message(message, "store response", NODE, |number, value| match number {
            2 => value.append_bools(&mut accepted, "flags", DHT_KEYS_MAX),
            _ => Ok(()),
        })?;
        Ok(Self { sender, accepted })
    }

    pub fn encode(&self) -> Vec<u8> {
        write_message(&self.sender, NODE, |out| put_bools(out, 2, self.accepted.iter().copied()))
    }
}

impl DhtFindRequest {
    pub fn decode(message: &[u8]) -> Result<Self, KwaaiWireError> {
        let mut keys = Vec::new();
        let sender = read_message(message, "find request", NODE, |number, value| match number {
            2 => push(&mut keys, DhtId::read(value.bytes("key")?, "key")?, "keys", DHT_KEYS_MAX),
            _ => Ok(()),
        })?;
        Ok(Self { sender, keys })
    }

    pub fn encode(&self) -> Vec<u8> {
        write_message(&self.sender, NODE, |out| self.keys.iter().for_each(|key| put_bytes(out, 2, &key.0)))
    }
}

impl<'a> DhtFindResponse<'a> {
    pub fn decode(message: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let mut results = Vec::new();
        let sender = read_message(message, "find response", NODE, |number, value| match number {
            2 => push(&mut results, DhtFindResult::read(value.bytes("result")?)?, "results", DHT_KEYS_MAX),
            _ => Ok(()),
        })?;
        Ok(Self { sender, results })
    }

    pub fn encode(&self) -> Vec<u8> {
        write_message(&self.sender, NODE, |out| {
            self.results.iter().for_each(|result| put_bytes(out, 2, &result.encode()));
        })
    }
}

impl<'a> DhtFindResult<'a> {
    fn read(message: &'a [u8]) -> Result<Self, KwaaiWireError> {
        let (mut kind, mut value, mut expires_at) = (0, &[][..], 0.0);
        let (mut nodes, mut peers) = (Vec::new(), Vec::new());
        read_fields(message, "result", |number, field| {
            match number {
                1 => kind = field.varint("result type")?,
                2 => value = field.bytes("value")?,
                3 => expires_at = field.double("expiration")?,
                4 => push(&mut nodes, DhtId::read(field.bytes("node id")?, "node id")?, "nodes", NEAREST_MAX)?,
                5 => push(&mut peers, field.bytes("peer id")?, "peers", NEAREST_MAX)?,
                _ => {}
            }
            Ok(())
        })?;
        let found = match kind {
            0 => DhtFound::Nothing,
            1 => DhtFound::Plain { value, expires_at },
            2 => DhtFound::Dictionary { value, expires_at },
            _ => return Err(KwaaiWireError::UnknownKind("result type")),
        };
        if nodes.len() != peers.len() {
            return Err(KwaaiWireError::Count { what: "peers", found: peers.len(), expected: nodes.len() });
        }
        Ok(Self { found, nearest: nodes.into_iter().zip(peers).collect() })
    }

    fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        let found = match self.found {
            DhtFound::Nothing => None,
            DhtFound::Plain { value, expires_at } => Some((1, value, expires_at)),
            DhtFound::Dictionary { value, expires_at } => Some((2, value, expires_at)),
        };
        if let Some((kind, value, expires_at)) = found {
            put_uint(&mut out, 1, kind);
            put_bytes(&mut out, 2, value);
            put_double(&mut out, 3, expires_at);
        }
        self.nearest.iter().for_each(|(node, _)| put_bytes(&mut out, 4, &node.0));
        self.nearest.iter().for_each(|(_, peer)| put_bytes(&mut out, 5, peer));
        out
    }
}
