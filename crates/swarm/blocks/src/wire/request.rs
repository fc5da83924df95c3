//! `Request`: what a client asks of a peer, and what a peer passes on to the next one.

use std::fmt;

use directory::{ModelDigest, PEER_ID_BYTES_MAX, PeerId};
use engine::Phase;
use types::LayerRange;

use super::activations::{Activations, bounded};
use super::{ADDRESS_BYTES_MAX, ADDRESSES_MAX, POSITIONS_MAX, ROWS_MAX, WireError};
use chains::{ByteReader, ByteWriter};

const LAYERS_MAX: usize = directory::LAYERS_MAX;
const PUSH_KEY_BYTES: usize = 16;

/// Lets whoever knows it pass rows on to a session. The client makes it at random, and tells the two peers.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct PushKey(pub [u8; PUSH_KEY_BYTES]);

impl fmt::Debug for PushKey {
    /// Not the key: logs are read by others.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("PushKey")
    }
}

/// To whom a session's rows are passed on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Next {
    pub peer: PeerId,
    pub key: PushKey,
    /// Multiaddresses, as text.
    pub addresses: Vec<String>,
}

/// Opens a session. The client chooses its number, which means nothing on other streams.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Open {
    pub session: u64,
    pub model: ModelDigest,
    pub layers: LayerRange,
    /// The chain ends with them: only the states that a run asks for are returned. Otherwise those of all rows are.
    pub is_last: bool,
    pub tokens_max: usize,
    /// With this key another peer may pass rows on to the session.
    pub accepts: Option<PushKey>,
    pub next: Option<Next>,
}

/// Runs rows, in the order in which they come. A reply repeats `run`.
#[derive(Clone, Debug, PartialEq)]
pub struct Run {
    pub run: u64,
    pub position: usize,
    pub phase: Phase,
    /// Of so many of the last rows the chain's last peer returns the states.
    pub state_rows: usize,
    /// Only the session's K/V is wanted: nothing is passed on, and the reply has no states.
    pub is_silent: bool,
    pub activations: Activations,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Request {
    Open(Open),
    Run {
        session: u64,
        run: Run,
    },
    /// From now on the session's rows come and go another way.
    Route {
        session: u64,
        accepts: Option<PushKey>,
        next: Option<Next>,
    },
    Close {
        session: u64,
    },
    Ping {
        number: u64,
    },
    /// Only between peers: rows for the session with this key.
    Push {
        key: PushKey,
        run: Run,
    },
}

mod kind {
    pub const OPEN: u8 = 1;
    pub const RUN: u8 = 2;
    pub const ROUTE: u8 = 3;
    pub const CLOSE: u8 = 4;
    pub const PING: u8 = 5;
    pub const PUSH: u8 = 6;
}

impl Request {
    /// Replaces `body`, and returns the kind.
    pub fn encode(&self, body: &mut Vec<u8>) -> u8 {
        body.clear();
        match self {
            Self::Open(open) => {
                body.put_u64(open.session);
                body.extend_from_slice(&open.model.0);
                body.put_u32(open.layers.start() as u32);
                body.put_u32(open.layers.end() as u32);
                body.put_u8(open.is_last.into());
                body.put_u32(open.tokens_max as u32);
                put_route(body, open.accepts, open.next.as_ref());
                kind::OPEN
            }
            Self::Run { session, run } => {
                body.put_u64(*session);
                run.encode(body);
                kind::RUN
            }
            Self::Route { session, accepts, next } => {
                body.put_u64(*session);
                put_route(body, *accepts, next.as_ref());
                kind::ROUTE
            }
            Self::Close { session } => {
                body.put_u64(*session);
                kind::CLOSE
            }
            Self::Ping { number } => {
                body.put_u64(*number);
                kind::PING
            }
            Self::Push { key, run } => {
                body.extend_from_slice(&key.0);
                run.encode(body);
                kind::PUSH
            }
        }
    }

    pub fn decode(kind: u8, body: &[u8]) -> Result<Self, WireError> {
        let mut reader = ByteReader::new(body);
        match kind {
            kind::OPEN => {
                let session = reader.u64("a session")?;
                let model = ModelDigest(reader.array("a model")?);
                let start = bounded(&mut reader, "the first layer", LAYERS_MAX)? as u32;
                let end = bounded(&mut reader, "the end of the layers", LAYERS_MAX)? as u32;
                let no_layers = WireError::Unknown { what: "the end of the layers", found: end.into() };
                let layers = LayerRange::new(start, end).ok_or(no_layers)?;
                let is_last = flag(&mut reader, "whether the chain ends")?;
                let tokens_max = bounded(&mut reader, "the length of a session", POSITIONS_MAX)?;
                let (accepts, next) = route(&mut reader)?;
                reader.finish()?;
                Ok(Self::Open(Open { session, model, layers, is_last, tokens_max, accepts, next }))
            }
            kind::RUN => {
                let session = reader.u64("a session")?;
                Ok(Self::Run { session, run: Run::decode(reader)? })
            }
            kind::ROUTE => {
                let session = reader.u64("a session")?;
                let (accepts, next) = route(&mut reader)?;
                reader.finish()?;
                Ok(Self::Route { session, accepts, next })
            }
            kind::CLOSE => {
                let session = reader.u64("a session")?;
                reader.finish()?;
                Ok(Self::Close { session })
            }
            kind::PING => {
                let number = reader.u64("a number")?;
                reader.finish()?;
                Ok(Self::Ping { number })
            }
            kind::PUSH => {
                let key = PushKey(reader.array("a key")?);
                Ok(Self::Push { key, run: Run::decode(reader)? })
            }
            _ => Err(WireError::Unknown { what: "the kind of a request", found: kind.into() }),
        }
    }
}

impl Run {
    fn encode(&self, body: &mut Vec<u8>) {
        body.put_u64(self.run);
        body.put_u32(self.position as u32);
        body.put_u8(match self.phase {
            Phase::Decode => 0,
            Phase::Prefill => 1,
        });
        body.put_u8(self.is_silent.into());
        body.put_u32(self.state_rows as u32);
        self.activations.encode(body);
    }

    fn decode(mut reader: ByteReader<'_>) -> Result<Self, WireError> {
        let run = reader.u64("a run")?;
        let position = bounded(&mut reader, "a position", POSITIONS_MAX)?;
        let phase = if flag(&mut reader, "a phase")? { Phase::Prefill } else { Phase::Decode };
        let is_silent = flag(&mut reader, "whether states are wanted")?;
        let state_rows = bounded(&mut reader, "the number of states", ROWS_MAX)?;
        let activations = Activations::decode(reader)?;
        let (found, max) = (state_rows as u64, activations.rows as u64);
        if found > max {
            return Err(WireError::TooLarge { what: "the number of states", found, max });
        }
        Ok(Self { run, position, phase, state_rows, is_silent, activations })
    }
}

fn put_route(body: &mut Vec<u8>, accepts: Option<PushKey>, next: Option<&Next>) {
    body.put_u8(accepts.is_some().into());
    accepts.iter().for_each(|key| body.extend_from_slice(&key.0));
    body.put_u8(next.is_some().into());
    let Some(Next { peer, key, addresses }) = next else { return };
    put_text(body, peer.as_bytes());
    body.extend_from_slice(&key.0);
    let addresses = addresses.iter().filter(|address| address.len() <= ADDRESS_BYTES_MAX).take(ADDRESSES_MAX);
    let addresses: Vec<&String> = addresses.collect();
    body.put_u32(addresses.len() as u32);
    addresses.iter().for_each(|address| put_text(body, address.as_bytes()));
}

fn route(reader: &mut ByteReader<'_>) -> Result<(Option<PushKey>, Option<Next>), WireError> {
    let key = |reader: &mut ByteReader<'_>| reader.array("a key").map(PushKey);
    let accepts = if flag(reader, "whether there is a key")? { Some(key(reader)?) } else { None };
    if !flag(reader, "whether there is a next peer")? {
        return Ok((accepts, None));
    }
    let peer = text(reader, "a peer", PEER_ID_BYTES_MAX)?;
    let peer = PeerId::new(&peer).ok_or(WireError::Unknown { what: "a peer", found: 0 })?;
    let key = key(reader)?;
    let count = bounded(reader, "the number of addresses", ADDRESSES_MAX)?;
    let address = |_| {
        let bytes = text(reader, "an address", ADDRESS_BYTES_MAX)?;
        String::from_utf8(bytes).map_err(|_| WireError::Unknown { what: "an address", found: 0 })
    };
    let addresses = (0..count).map(address).collect::<Result<_, _>>()?;
    Ok((accepts, Some(Next { peer, key, addresses })))
}

pub(super) fn flag(reader: &mut ByteReader<'_>, what: &'static str) -> Result<bool, WireError> {
    match reader.u8(what)? {
        0 => Ok(false),
        1 => Ok(true),
        other => Err(WireError::Unknown { what, found: other.into() }),
    }
}

pub(super) fn put_text(body: &mut Vec<u8>, text: &[u8]) {
    body.put_u32(text.len() as u32);
    body.extend_from_slice(text);
}

pub(super) fn text(reader: &mut ByteReader<'_>, what: &'static str, max: usize) -> Result<Vec<u8>, WireError> {
    let length = bounded(reader, what, max)?;
    (0..length).map(|_| reader.u8(what)).collect()
}
