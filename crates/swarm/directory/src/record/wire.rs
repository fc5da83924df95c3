//! The bytes of a record without its signature. Numbers are little-endian:
//!
//! ```text
//! version u8 = 1 | peer: len u8, bytes | sequence u64 | issued ms u64 | lifetime ms u32 | model [u8; 32]
//! start u32, end u32 | use u8 | dtype u8 (GGUF's number) | state u8, for "draining to": start u32, end u32 | reach u8
//! layer_seconds, layer_tokens_per_s, queue_seconds, bytes_per_s: f32 | kv_tokens_free u32
//! coordinate: 0u8, or 1u8 and position 3 × f32, height f32, error f32
//! neighbours: count u8, each: peer: len u8, bytes | round_trip_seconds f32
//! ```

use types::{DType, LayerRange};

use super::{BlockRecord, BlockUse, NEIGHBOURS_MAX, Neighbour, Reach, RecordError, ServiceState, Speed};
use crate::coordinate::Coordinate;
use crate::identity::{ModelDigest, PEER_ID_BYTES_MAX, PeerId, UnixTime};

const VERSION: u8 = 1;

const PEER_BYTES_MAX: usize = 1 + PEER_ID_BYTES_MAX;
/// The longest record without its signature.
pub(super) const BODY_BYTES_MAX: usize = (1 + PEER_BYTES_MAX + 8 + 8 + 4 + 32)
    + (8 + 1 + 1 + 9 + 1)
    + (16 + 4)
    + (1 + 20)
    + (1 + NEIGHBOURS_MAX * (PEER_BYTES_MAX + 4));

/// The numbers that GGUF gives these formats.
const DTYPES: [(u8, DType); 13] = [
    (0, DType::F32),
    (1, DType::F16),
    (2, DType::Q4_0),
    (3, DType::Q4_1),
    (6, DType::Q5_0),
    (7, DType::Q5_1),
    (8, DType::Q8_0),
    (10, DType::Q2_K),
    (11, DType::Q3_K),
    (12, DType::Q4_K),
    (13, DType::Q5_K),
    (14, DType::Q6_K),
    (30, DType::BF16),
];

pub(super) fn encode(record: &BlockRecord) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(BODY_BYTES_MAX);
    bytes.push(VERSION);
    put_peer(&mut bytes, &record.peer);
    bytes.extend(record.sequence.to_le_bytes());
    bytes.extend(record.issued.0.to_le_bytes());
    bytes.extend(record.lifetime_ms.to_le_bytes());
    bytes.extend(record.model.0);
    put_layers(&mut bytes, record.layers);
    bytes.push(match record.block_use {
        BlockUse::AnyRange => 0,
        BlockUse::Whole => 1,
    });
    let number = DTYPES.iter().find(|(_, dtype)| *dtype == record.dtype).expect("every format has a number").0;
    bytes.push(number);
    match record.state {
        ServiceState::Joining => bytes.push(0),
        ServiceState::Serving => bytes.push(1),
        ServiceState::Draining { next: None } => bytes.push(2),
        ServiceState::Draining { next: Some(next) } => {
            bytes.push(3);
            put_layers(&mut bytes, next);
        }
    }
    bytes.push(match record.reach {
        Reach::Direct => 0,
        Reach::Relayed => 1,
    });
    let Speed { layer_seconds, layer_tokens_per_s, queue_seconds, bytes_per_s } = record.speed;
    put_floats(&mut bytes, &[layer_seconds, layer_tokens_per_s, queue_seconds, bytes_per_s]);
    bytes.extend(record.kv_tokens_free.to_le_bytes());
    bytes.push(record.coordinate.is_some().into());
    if let Some(Coordinate { position: [x, y, z], height, error }) = record.coordinate {
        put_floats(&mut bytes, &[x, y, z, height, error]);
    }
    bytes.push(record.neighbours.len() as u8);
    for neighbour in &record.neighbours {
        put_peer(&mut bytes, &neighbour.peer);
        put_floats(&mut bytes, &[neighbour.round_trip_seconds]);
    }
    bytes
}

/// Also returns the bytes after the record. Values are not checked against their limits.
pub(super) fn decode(bytes: &[u8]) -> Result<(BlockRecord, &[u8]), RecordError> {
    let mut reader = Reader(bytes);
    let version = reader.byte()?;
    if version != VERSION {
        return Err(RecordError::Version { ours: VERSION, theirs: version });
    }
    let record = BlockRecord {
        peer: reader.peer()?,
        sequence: u64::from_le_bytes(reader.array()?),
        issued: UnixTime(u64::from_le_bytes(reader.array()?)),
        lifetime_ms: u32::from_le_bytes(reader.array()?),
        model: ModelDigest(reader.array()?),
        layers: reader.layers()?,
        block_use: reader.choice("use of the block", |number| match number {
            0 => Some(BlockUse::AnyRange),
            1 => Some(BlockUse::Whole),
            _ => None,
        })?,
        dtype: reader.choice("number format", |number| {
            DTYPES.iter().find(|(known, _)| *known == number).map(|(_, dtype)| *dtype)
        })?,
        state: match reader.byte()? {
            0 => ServiceState::Joining,
            1 => ServiceState::Serving,
            2 => ServiceState::Draining { next: None },
            3 => ServiceState::Draining { next: Some(reader.layers()?) },
            _ => return Err(RecordError::Field { field: "state" }),
        },
        reach: reader.choice("reach", |number| match number {
            0 => Some(Reach::Direct),
            1 => Some(Reach::Relayed),
            _ => None,
        })?,
        speed: Speed {
            layer_seconds: reader.float()?,
            layer_tokens_per_s: reader.float()?,
            queue_seconds: reader.float()?,
            bytes_per_s: reader.float()?,
        },
        kv_tokens_free: u32::from_le_bytes(reader.array()?),
        coordinate: reader.coordinate()?,
        neighbours: reader.neighbours()?,
    };
    Ok((record, reader.0))
}

fn put_peer(bytes: &mut Vec<u8>, peer: &PeerId) {
    bytes.push(peer.as_bytes().len() as u8);
    bytes.extend(peer.as_bytes());
}

fn put_layers(bytes: &mut Vec<u8>, layers: LayerRange) {
    bytes.extend((layers.start() as u32).to_le_bytes());
    bytes.extend((layers.end() as u32).to_le_bytes());
}

fn put_floats(bytes: &mut Vec<u8>, values: &[f32]) {
    values.iter().for_each(|value| bytes.extend(value.to_le_bytes()));
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn array<const N: usize>(&mut self) -> Result<[u8; N], RecordError> {
        let (head, rest) = self.0.split_first_chunk().ok_or(RecordError::Length)?;
        self.0 = rest;
        Ok(*head)
    }

    fn byte(&mut self) -> Result<u8, RecordError> {
        self.array::<1>().map(|[byte]| byte)
    }

    fn float(&mut self) -> Result<f32, RecordError> {
        self.array().map(f32::from_le_bytes)
    }

    fn choice<T>(&mut self, field: &'static str, known: impl Fn(u8) -> Option<T>) -> Result<T, RecordError> {
        known(self.byte()?).ok_or(RecordError::Field { field })
    }

    fn peer(&mut self) -> Result<PeerId, RecordError> {
        let len = self.byte()?.into();
        let (id, rest) = self.0.split_at_checked(len).ok_or(RecordError::Length)?;
        self.0 = rest;
        PeerId::new(id).ok_or(RecordError::Field { field: "peer" })
    }

    fn layers(&mut self) -> Result<LayerRange, RecordError> {
        let (start, end) = (u32::from_le_bytes(self.array()?), u32::from_le_bytes(self.array()?));
        LayerRange::new(start, end).ok_or(RecordError::Field { field: "layers" })
    }

    fn coordinate(&mut self) -> Result<Option<Coordinate>, RecordError> {
        match self.byte()? {
            0 => Ok(None),
            1 => {
                let position = [self.float()?, self.float()?, self.float()?];
                Ok(Some(Coordinate { position, height: self.float()?, error: self.float()? }))
            }
            _ => Err(RecordError::Field { field: "coordinate" }),
        }
    }

    fn neighbours(&mut self) -> Result<Vec<Neighbour>, RecordError> {
        let count = usize::from(self.byte()?);
        if count > NEIGHBOURS_MAX {
            return Err(RecordError::Limit { field: "number of neighbours", value: count as f64 });
        }
        (0..count).map(|_| Ok(Neighbour { peer: self.peer()?, round_trip_seconds: self.float()? })).collect()
    }
}
