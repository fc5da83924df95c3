//! Any line sent to a rank or its supervisor is a message or an error, and costs little memory.
#![no_main]

use std::io::BufReader;

use engine::{StepOutput, StepPlan};
use libfuzzer_sys::fuzz_target;
use ranks::protocol::{LineMessage, Lines, RankReply, RankRequest, ReadError, encode};

/// The longest line: short, so that some lines of the inputs are longer.
const LINE_BYTES_MAX: usize = 1000;
const VOCAB: usize = 50;

fuzz_target!(
    init: fuzz::plant("line_protocol", &fuzz::seed_files("line_protocol")),
    |input: &[u8]| {
        fuzz::within_memory(input, |input| {
            read_all::<RankRequest>(input, |_| {});
            read_all::<RankReply>(input, |_| {});
        });
        let mut plan = StepPlan::new();
        read_all(input, |request: RankRequest| run(&request, &mut plan));
        read_all(input, |reply: RankReply| {
            if let RankReply::StepOk { output, .. } = &reply {
                // The output may or may not match the plan.
                let _ = output.fill(&plan, VOCAB, &mut StepOutput::new());
            }
        });
    }
);

/// Reads all lines, each with what is attached to it, and checks that none is passed over.
fn read_all<M: LineMessage>(input: &[u8], mut each: impl FnMut(M)) {
    // A reader that returns a few bytes at a time reveals what depends on the end of its buffer.
    let mut lines = Lines::with_limit(BufReader::with_capacity(7, input), LINE_BYTES_MAX);
    let mut rest = input;
    while !rest.is_empty() {
        let end = rest.iter().position(|&byte| byte == b'\n');
        let (line, after) = end.map_or((rest, &[][..]), |end| (&rest[..end], &rest[end + 1..]));
        rest = after;
        if line.len() > LINE_BYTES_MAX {
            let read = lines.read::<M>();
            assert!(matches!(read, Some(Err(ReadError::TooLong { max: LINE_BYTES_MAX }))), "a line that is too long");
        } else if !line.trim_ascii().is_empty() {
            match lines.read::<M>() {
                Some(Ok(message)) => {
                    rest = &rest[message.attached().map_or(0, |attached| attached.bytes().len())..];
                    reads_back(&message);
                    each(message);
                }
                // The input ended before all that the line announced.
                Some(Err(ReadError::Io(_))) => break,
                Some(Err(error)) => {
                    let reply = error.reply().expect("memory can be read");
                    reads_back(&reply);
                }
                None => panic!("a line was passed over"),
            }
        }
    }
    assert!(lines.read::<M>().is_none(), "there are no more lines");
}

/// A message that is written and read again is written the same: bit for bit, NaN included.
fn reads_back<M: LineMessage>(message: &M) {
    let mut line = Vec::new();
    encode(message, &mut line).expect("what was read from a line fits into one");
    let again: M = Lines::new(&line[..]).read().expect("a line was written").expect("what was written is read");
    let mut second = Vec::new();
    encode(&again, &mut second).expect("it did before");
    assert_eq!(line, second, "{}", line.escape_ascii());
}

/// Checks a request as a rank does before it runs it. Leaves the plan of a step in `plan`.
fn run(request: &RankRequest, plan: &mut StepPlan) {
    match request {
        RankRequest::Step { plan: wire, .. } => {
            if wire.fill(VOCAB, plan).is_ok() {
                let mut again = StepPlan::new();
                let RankRequest::Step { plan: wire, .. } = (RankRequest::Step { id: 0, plan: (&*plan).into() }) else {
                    return;
                };
                wire.fill(VOCAB, &mut again).expect("a plan that was checked passes again");
                assert_eq!(format!("{plan:?}"), format!("{again:?}"));
            }
        }
        RankRequest::Open { prefix, .. } => drop(prefix.check(VOCAB)),
        _ => {}
    }
}
