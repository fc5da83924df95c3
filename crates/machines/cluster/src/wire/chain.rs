//! Messages along a chain: session operations and steps, from the coordinator to the first stage, and from each stage to
//! the next; and the results, from the last stage to the coordinator.
//!
//! Every stage keeps a session table of its own. The coordinator's table decides, so an operation carries the result that
//! it had there. A stage whose result differs is at fault.

use chains::{ByteReader, ByteWriter, WireError, read_f32s};
use engine::{PageHash, Phase, SESSIONS_MAX};
use types::SessionId;

/// Tokens of one session.
const POSITIONS_MAX: usize = 1 << 24;
/// Rows of one step.
const ROWS_MAX: usize = 1 << 18;
/// Values of one row of activations.
const HIDDEN_MAX: usize = 1 << 20;
/// Whole pages of one prompt.
const PAGES_MAX: usize = POSITIONS_MAX / kernels::PAGE_TOKENS;
/// Stages of one chain.
pub const STAGES_MAX: usize = 256;
/// Bytes of the text of a fault.
const FAULT_BYTES_MAX: usize = 4 << 10;
/// Bytes of the largest message, besides activations.
const HEAD_BYTES_MAX: usize = 64 + PAGES_MAX * 32 + SESSIONS_MAX * ENTRY_BYTES + STAGES_MAX * 4;
/// Bytes of one entry of a step.
const ENTRY_BYTES: usize = 33;

/// The kind of a message, in the byte that stands before its body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum ChainKind {
    Open = 1,
    Truncate = 2,
    Close = 3,
    Step = 4,
    /// From the last stage to the coordinator: the states of a step.
    States = 5,
    /// From the last stage to the coordinator: a stage cannot go on.
    Fault = 6,
}

impl ChainKind {
    pub fn parse(byte: u8) -> Result<Self, WireError> {
        let all = [Self::Open, Self::Truncate, Self::Close, Self::Step, Self::States, Self::Fault];
        let unknown = WireError::Unknown { what: "the kind of a message", found: byte.into() };
        all.into_iter().find(|&kind| kind as u8 == byte).ok_or(unknown)
    }

    /// The largest body, for steps of at most `rows` rows of `hidden` values.
    pub fn bytes_max(self, rows: usize, hidden: usize) -> usize {
        match self {
            Self::Step | Self::States => {
                HEAD_BYTES_MAX + rows.min(ROWS_MAX) * hidden.min(HIDDEN_MAX) * size_of::<f32>()
            }
            Self::Open => HEAD_BYTES_MAX,
            Self::Truncate | Self::Close => 64,
            Self::Fault => FAULT_BYTES_MAX + 64,
        }
    }
}

/// Opens a session: see [`engine::Executor::open`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OpenMessage {
    pub tokens_max: usize,
    pub reuse_max: usize,
    pub pages: Vec<PageHash>,
    /// The result at the coordinator.
    pub session: SessionId,
    pub computed: usize,
}

impl OpenMessage {
    pub fn encode(&self, bytes: &mut Vec<u8>) -> ChainKind {
        bytes.clear();
        for number in [self.tokens_max, self.reuse_max, self.computed] {
            bytes.put_u64(number as u64);
        }
        bytes.put_u64(self.session.0);
        bytes.put_u64(self.pages.len() as u64);
        self.pages.iter().for_each(|hash| bytes.extend_from_slice(&hash.0));
        ChainKind::Open
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = ByteReader::new(bytes);
        let tokens_max = reader.count("the length of a session", POSITIONS_MAX)?;
        let reuse_max = reader.count("the reusable length of a session", POSITIONS_MAX)?;
        let computed = reader.count("the computed length of a session", POSITIONS_MAX)?;
        let session = SessionId(reader.u64("a session")?);
        let count = reader.items("the number of pages", PAGES_MAX, 32)?;
        let pages = (0..count).map(|_| reader.array("a page").map(PageHash)).collect::<Result<_, _>>()?;
        reader.finish()?;
        Ok(Self { tokens_max, reuse_max, pages, session, computed })
    }
}

/// Truncates a session: see [`engine::Executor::truncate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruncateMessage {
    pub session: SessionId,
    pub tokens: usize,
    /// The result at the coordinator.
    pub kept: usize,
}

impl TruncateMessage {
    pub fn encode(&self, bytes: &mut Vec<u8>) -> ChainKind {
        bytes.clear();
        bytes.put_u64(self.session.0);
        bytes.put_u64(self.tokens as u64);
        bytes.put_u64(self.kept as u64);
        ChainKind::Truncate
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = ByteReader::new(bytes);
        let session = SessionId(reader.u64("a session")?);
        let tokens = reader.count("the length of a session", POSITIONS_MAX)?;
        let kept = reader.count("the kept length of a session", POSITIONS_MAX)?;
        reader.finish()?;
        Ok(Self { session, tokens, kept })
    }
}

/// Closes a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CloseMessage {
    pub session: SessionId,
}

impl CloseMessage {
    pub fn encode(&self, bytes: &mut Vec<u8>) -> ChainKind {
        bytes.clear();
        bytes.put_u64(self.session.0);
        ChainKind::Close
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = ByteReader::new(bytes);
        let session = SessionId(reader.u64("a session")?);
        reader.finish()?;
        Ok(Self { session })
    }
}

/// One sequence's part of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepEntry {
    pub session: SessionId,
    pub phase: Phase,
    pub position: usize,
    pub rows: usize,
    /// How many of its last rows the last stage returns.
    pub state_rows: usize,
}

/// A step with the activations that the stage begins with. Its memory is reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StepMessage {
    pub number: u64,
    /// The time that each stage so far took to compute the step, in microseconds.
    pub compute_us: Vec<u32>,
    pub entries: Vec<StepEntry>,
    /// `[rows, hidden]`.
    pub activations: Vec<f32>,
}

impl StepMessage {
    pub fn rows(&self) -> usize {
        self.entries.iter().map(|entry| entry.rows).sum()
    }

    pub fn state_rows(&self) -> usize {
        self.entries.iter().map(|entry| entry.state_rows).sum()
    }

    pub fn encode(&self, bytes: &mut Vec<u8>) -> ChainKind {
        bytes.clear();
        bytes.put_u64(self.number);
        put_times(bytes, &self.compute_us);
        bytes.put_u64(self.entries.len() as u64);
        for entry in &self.entries {
            bytes.put_u64(entry.session.0);
            bytes.put_u8(u8::from(entry.phase == Phase::Prefill));
            for number in [entry.position, entry.rows, entry.state_rows] {
                bytes.put_u64(number as u64);
            }
        }
        bytes.put_f32s(&self.activations);
        ChainKind::Step
    }

    /// Replaces this with the step in `bytes`, whose rows have `hidden` values.
    pub fn decode(&mut self, bytes: &[u8], hidden: usize) -> Result<(), WireError> {
        let mut reader = ByteReader::new(bytes);
        self.number = reader.u64("the number of a step")?;
        read_times(&mut reader, &mut self.compute_us)?;
        let count = reader.items("the number of sequences", SESSIONS_MAX, ENTRY_BYTES)?;
        self.entries.clear();
        let mut rows = 0;
        for _ in 0..count {
            let entry = read_entry(&mut reader)?;
            if self.entries.last().is_some_and(|last| last.phase > entry.phase) {
                return Err(WireError::OutOfOrder);
            }
            rows += entry.rows;
            self.entries.push(entry);
        }
        if rows > ROWS_MAX {
            return Err(WireError::TooLarge { what: "the number of rows", found: rows as u64, max: ROWS_MAX as u64 });
        }
        read_f32s(reader.rest(), rows * hidden, &mut self.activations)
    }
}

/// The states of the rows that a step returns. Its memory is reused.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct StatesMessage {
    pub number: u64,
    /// The time that each stage took to compute the step, in microseconds.
    pub compute_us: Vec<u32>,
    /// `[state rows, hidden]`, in the order of the step's entries.
    pub states: Vec<f32>,
}

impl StatesMessage {
    pub fn encode(&self, bytes: &mut Vec<u8>) -> ChainKind {
        bytes.clear();
        bytes.put_u64(self.number);
        put_times(bytes, &self.compute_us);
        bytes.put_f32s(&self.states);
        ChainKind::States
    }

    /// Replaces this with the states in `bytes`. The caller checks their number.
    pub fn decode(&mut self, bytes: &[u8]) -> Result<(), WireError> {
        let mut reader = ByteReader::new(bytes);
        self.number = reader.u64("the number of a step")?;
        read_times(&mut reader, &mut self.compute_us)?;
        let rest = reader.rest();
        read_f32s(rest, rest.len() / size_of::<f32>(), &mut self.states)
    }
}

/// Why a stage cannot go on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultMessage {
    /// The index of the stage among those that the coordinator called, from 0.
    pub stage: usize,
    pub why: String,
}

impl FaultMessage {
    pub fn encode(&self, bytes: &mut Vec<u8>) -> ChainKind {
        bytes.clear();
        bytes.put_u64(self.stage as u64);
        let end = self.why.floor_char_boundary(FAULT_BYTES_MAX);
        bytes.extend_from_slice(&self.why.as_bytes()[..end]);
        ChainKind::Fault
    }

    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let mut reader = ByteReader::new(bytes);
        let stage = reader.count("the index of a stage", STAGES_MAX)?;
        let why = String::from_utf8_lossy(reader.rest()).into_owned();
        Ok(Self { stage, why })
    }
}

fn read_entry(reader: &mut ByteReader<'_>) -> Result<StepEntry, WireError> {
    let session = SessionId(reader.u64("a session")?);
    let phase = match reader.u8("a phase")? {
        0 => Phase::Decode,
        1 => Phase::Prefill,
        found => return Err(WireError::Unknown { what: "a phase", found: found.into() }),
    };
    let position = reader.count("a position", POSITIONS_MAX)?;
    let rows = reader.count("the rows of a sequence", ROWS_MAX)?;
    let state_rows = reader.count("the returned rows of a sequence", rows)?;
    if rows == 0 {
        return Err(WireError::Unknown { what: "the rows of a sequence", found: 0 });
    }
    Ok(StepEntry { session, phase, position, rows, state_rows })
}

fn put_times(bytes: &mut Vec<u8>, times: &[u32]) {
    bytes.put_u64(times.len() as u64);
    times.iter().for_each(|&time| bytes.put_u32(time));
}

fn read_times(reader: &mut ByteReader<'_>, times: &mut Vec<u32>) -> Result<(), WireError> {
    let count = reader.items("the number of stages", STAGES_MAX, size_of::<u32>())?;
    times.clear();
    for _ in 0..count {
        times.push(reader.u32("the time of a stage")?);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn entry() -> impl Strategy<Value = StepEntry> {
        let phase = prop::bool::ANY.prop_map(|prefill| if prefill { Phase::Prefill } else { Phase::Decode });
        (any::<u64>(), phase, 0..POSITIONS_MAX, 1_usize..5, 0_usize..5).prop_map(
            |(session, phase, position, rows, state_rows)| StepEntry {
                session: SessionId(session),
                phase,
                position,
                rows,
                state_rows: state_rows.min(rows),
            },
        )
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(
            number: u64, times in prop::collection::vec(any::<u32>(), 0..5), entries in prop::collection::vec(entry(), 0..6),
            hashes in prop::collection::vec(any::<[u8; 32]>(), 0..4), why in "\\PC{0,40}",
        ) {
            let mut bytes = Vec::new();
            let mut entries = entries;
            entries.sort_by_key(|entry| entry.phase);
            let rows: usize = entries.iter().map(|entry| entry.rows).sum();
            let activations: Vec<f32> = (0..rows * 3).map(|index| index as f32 - 2.5).collect();
            let step = StepMessage { number, compute_us: times.clone(), entries, activations: activations.clone() };
            step.encode(&mut bytes);
            prop_assert!(bytes.len() <= ChainKind::Step.bytes_max(rows, 3));
            let mut read = StepMessage::default();
            prop_assert_eq!(read.decode(&bytes, 3), Ok(()));
            prop_assert_eq!(&read, &step);
            prop_assert!(read.decode(&bytes[..bytes.len() - 1], 3).is_err());

            let states = StatesMessage { number, compute_us: times, states: activations };
            states.encode(&mut bytes);
            let mut read = StatesMessage::default();
            prop_assert_eq!(read.decode(&bytes), Ok(()));
            prop_assert_eq!(read, states);

            let pages = hashes.into_iter().map(PageHash).collect();
            let open = OpenMessage { tokens_max: 77, reuse_max: 64, pages, session: SessionId(number), computed: 32 };
            open.encode(&mut bytes);
            prop_assert_eq!(OpenMessage::decode(&bytes), Ok(open));
            let truncate = TruncateMessage { session: SessionId(number), tokens: 9, kept: 8 };
            truncate.encode(&mut bytes);
            prop_assert_eq!(TruncateMessage::decode(&bytes), Ok(truncate));
            let close = CloseMessage { session: SessionId(number) };
            close.encode(&mut bytes);
            prop_assert_eq!(CloseMessage::decode(&bytes), Ok(close));
            let fault = FaultMessage { stage: 3, why };
            fault.encode(&mut bytes);
            prop_assert_eq!(FaultMessage::decode(&bytes), Ok(fault));
        }

        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in prop::collection::vec(any::<u8>(), 0..200), hidden in 1_usize..9) {
            let _ = StepMessage::default().decode(&bytes, hidden);
            let _ = StatesMessage::default().decode(&bytes);
            let _ = OpenMessage::decode(&bytes);
            let _ = TruncateMessage::decode(&bytes);
            let _ = CloseMessage::decode(&bytes);
            let _ = FaultMessage::decode(&bytes);
        }
    }

    #[test]
    fn a_count_beyond_the_message_allocates_nothing() {
        let mut bytes = Vec::new();
        for number in [1, 1, 1, 7, PAGES_MAX as u64] {
            bytes.put_u64(number);
        }
        assert_eq!(OpenMessage::decode(&bytes), Err(WireError::Truncated { what: "the number of pages" }));
        bytes.clear();
        bytes.put_u64(1);
        bytes.put_u64(STAGES_MAX as u64 + 1);
        let found = StepMessage::default().decode(&bytes, 8);
        assert!(matches!(found, Err(WireError::TooLarge { .. })), "{found:?}");
    }
}
