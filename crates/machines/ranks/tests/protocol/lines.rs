//! Streams of lines: each line is one message or one error, and after an error the next line is read normally.

use std::io::{self, BufReader, Read, Write};

use proptest::prelude::*;
use ranks::protocol::limits::{ENTRIES_MAX, FILES_MAX, IMAGES_MAX};
use ranks::protocol::{
    ErrorKind, LINE_BYTES_MAX, LineMessage, Lines, RankReply, RankRequest, ReadError, WriteError, Writer,
};

/// The result of each line: the op, or the kind of error.
fn taken(bytes: &[u8], bytes_max: usize) -> Vec<&'static str> {
    // A reader that returns a few bytes at a time reveals what depends on the end of its buffer.
    let mut lines = Lines::with_limit(BufReader::with_capacity(7, bytes), bytes_max);
    let mut taken = Vec::new();
    while let Some(read) = lines.read::<RankRequest>() {
        taken.push(match read {
            Ok(request) => request.op(),
            Err(ReadError::TooLong { .. }) => "too long",
            Err(ReadError::Malformed { .. }) => "malformed",
            Err(ReadError::UnknownOp { .. }) => "unknown",
            Err(ReadError::Io(error)) => panic!("memory can be read: {error}"),
        });
    }
    taken
}

fn check(text: impl AsRef<[u8]>, expected: &[&str]) {
    assert_eq!(taken(text.as_ref(), 200), expected, "{}", text.as_ref().escape_ascii());
}

#[test]
fn blank_lines_are_passed_over() {
    check("", &[]);
    check("\n", &[]);
    check("\n \n\t\r\n", &[]);
    check("\n\n{\"op\":\"ping\"}\n \r\n{\"op\":\"shutdown\"}\r\n\n", &["ping", "shutdown"]);
    check("  {\"op\" : \"ping\"}\t\n", &["ping"]);
}

#[test]
fn a_last_line_without_an_end_counts() {
    check("{\"op\":\"ping\"}\n{\"op\":\"ping\"}", &["ping", "ping"]);
    check("{\"op\":\"ping\"}\n{\"op\":\"pi", &["ping", "malformed"]);
}

#[test]
fn what_is_no_message_leaves_the_next_line_alone() {
    for line in [
        &b"\xff\xfe{}"[..],
        b"{\"op\":\"ping\",\"x\":\"\xc3\x28\"}",
        b"{",
        b"[\"ping\"]",
        b"[[[[",
        b"\"ping\"",
        b"null",
        b"{\"op\":\"ping\"} {\"op\":\"ping\"}",
        b"{\"op\":\"ping\",}",
        b"{\"op\":\"ping\"\0}",
        b"op: ping",
        b"\xef\xbb\xbf{\"op\":\"ping\"}",
    ] {
        check([line, b"\n{\"op\":\"ping\"}\n"].concat(), &["malformed", "ping"]);
    }
    check("{\"op\":\"\"}\n{\"op\":\"PING\"}\n{\"op\":\"ping\"}\n", &["unknown", "unknown", "ping"]);
}

#[test]
fn a_line_that_is_too_long_is_skipped_to_its_end() {
    let line = |bytes: usize| {
        let empty = "{\"op\":\"init\",\"comm_id\":\"\"}";
        empty.replace("\"\"", &format!("\"{}\"", "a".repeat(bytes - empty.len())))
    };
    let ping = "{\"op\":\"ping\"}";
    check(format!("{}\n{ping}\n", line(200)), &["init", "ping"]);
    check(format!("{}\n{ping}\n", line(201)), &["too long", "ping"]);
    check(format!("{}\n{ping}\n", line(5000)), &["too long", "ping"]);
    check(line(200), &["init"]);
    check(line(201), &["too long"]);
    check(line(400), &["too long"]);
    check(format!("{}\n{}\n{}", line(300), line(200), line(300)), &["too long", "init", "too long"]);
    check(format!("{}\n{ping}", " ".repeat(201)), &["too long", "ping"]);

    let endless = io::repeat(b'[').take(LINE_BYTES_MAX as u64 + 10).chain(&b"\n{\"op\":\"ping\"}\n"[..]);
    let mut lines = Lines::new(BufReader::with_capacity(1 << 16, endless));
    let error = lines.read::<RankRequest>().unwrap().unwrap_err();
    assert!(matches!(error, ReadError::TooLong { max: LINE_BYTES_MAX }));
    assert!(matches!(error.reply(), Some(RankReply::Error { kind: ErrorKind::BadRequest, id: None, .. })));
    assert_eq!(lines.read::<RankRequest>().unwrap().unwrap(), RankRequest::Ping);
    assert!(lines.read::<RankRequest>().is_none());
}

#[test]
fn deep_nesting_does_not_use_up_the_stack() {
    let deep = 1_000_000;
    for (open, close) in [("[", "]"), ("{\"a\":", "}")] {
        let (open, close) = (open.repeat(deep), close.repeat(deep));
        for line in [
            format!("{open}0{close}"),
            format!("{{\"op\":\"ping\",\"x\":{open}0{close}}}"),
            format!("{{\"op\":\"ping\",\"x\":{open}"),
            format!("{{\"op\":{open}0{close}}}"),
            format!("{{\"op\":\"step\",\"id\":1,\"plan\":{open}0{close}}}"),
            format!("{{\"op\":\"step\",\"id\":1,\"plan\":{{\"entries\":{open}0{close}}}}}"),
            format!(
                "{{\"op\":\"step\",\"id\":1,\"plan\":{{\"entries\":[{{\"requested\":{{\"sample\":{open}0{close}}}}}]}}}}"
            ),
        ] {
            let text = format!("{line}\n{{\"op\":\"ping\"}}\n");
            let taken = taken(text.as_bytes(), LINE_BYTES_MAX);
            assert_eq!(taken.len(), 2);
            assert!(["malformed", "ping"].contains(&taken[0]), "{}", taken[0]);
            assert_eq!(taken[1], "ping");
        }
    }
}

#[test]
fn a_list_is_read_up_to_its_limit() {
    let files = |count: usize| {
        let list = vec!["\"\""; count].join(",");
        format!(
            "{{\"op\":\"load_dense_shard\",\"model_id\":\"m\",\"config_json\":\"{{}}\",\"safetensors_paths\":[{list}]}}"
        )
    };
    let images = |count: usize| {
        let list = vec!["\"\""; count].join(",");
        let rest = "\"model_id\":\"m\",\"tokens\":[],\"offset\":0,\"image_token_id\":1,\"chunk_size\":1";
        format!("{{\"op\":\"generate_step_with_images\",{rest},\"image_data_uris\":[{list}]}}")
    };
    let entries = |count: usize| {
        let entry = "{\"session\":1,\"phase\":\"prefill\",\"position\":0,\"tokens\":[1],\"requested\":\"nothing\"}";
        format!("{{\"op\":\"step\",\"id\":1,\"plan\":{{\"entries\":[{}]}}}}", vec![entry; count].join(","))
    };
    let check = |line: &dyn Fn(usize) -> String, max: usize, op: &str| {
        let text = format!("{}\n{}\n", line(max), line(max + 1));
        let mut lines = Lines::new(text.as_bytes());
        assert_eq!(lines.read::<RankRequest>().unwrap().unwrap().op(), op);
        let error = lines.read::<RankRequest>().unwrap().unwrap_err();
        assert!(error.to_string().contains(&format!("a list of at most {max}")), "{error}");
    };
    check(&files, FILES_MAX, "load_dense_shard");
    check(&images, IMAGES_MAX, "generate_step_with_images");
    check(&entries, ENTRIES_MAX, "step");
}

#[test]
fn a_reader_that_fails_is_no_end_of_input() {
    struct Broken;
    impl Read for Broken {
        fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
            Err(io::ErrorKind::ConnectionReset.into())
        }
    }
    let mut lines = Lines::new(BufReader::new((&b"{\"op\":\"ping\"}\n{\"op\""[..]).chain(Broken)));
    assert_eq!(lines.read::<RankRequest>().unwrap().unwrap(), RankRequest::Ping);
    let error = lines.read::<RankRequest>().unwrap().unwrap_err();
    assert!(matches!(&error, ReadError::Io(error) if error.kind() == io::ErrorKind::ConnectionReset));
    assert!(error.reply().is_none());
}

/// The bytes written, and how many of them before the last flush.
#[derive(Default)]
struct Pipe {
    bytes: Vec<u8>,
    flushed: usize,
}

impl Write for &mut Pipe {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let taken = bytes.len().min(5);
        self.bytes.extend_from_slice(&bytes[..taken]);
        Ok(taken)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.flushed = self.bytes.len();
        Ok(())
    }
}

#[test]
fn each_message_is_one_line_and_flushed() {
    let mut pipe = Pipe::default();
    let strange = RankRequest::Init { comm_id: "a\nb\r\u{2028}\u{85}\0\"".to_owned() };
    for count in 1..=3 {
        Writer::new(&mut pipe).write(&strange).unwrap();
        assert_eq!(pipe.flushed, pipe.bytes.len());
        assert_eq!(pipe.bytes.iter().filter(|&&byte| byte == b'\n').count(), count);
        assert!(!pipe.bytes.contains(&b'\r') && pipe.bytes.ends_with(b"}\n"));
    }
    let mut lines = Lines::new(&pipe.bytes[..]);
    for _ in 0..3 {
        assert_eq!(lines.read::<RankRequest>().unwrap().unwrap(), strange);
    }
}

#[test]
fn nothing_is_written_of_a_message_that_is_too_long_for_a_line() {
    let mut pipe = Pipe::default();
    let long = RankRequest::Init { comm_id: "a".repeat(LINE_BYTES_MAX) };
    assert!(
        matches!(Writer::new(&mut pipe).write(&long), Err(WriteError::TooLong { bytes }) if bytes > LINE_BYTES_MAX)
    );
    assert!(pipe.bytes.is_empty());
}

/// Fragments of messages mixed with random bytes.
fn rubble() -> impl Strategy<Value = Vec<u8>> {
    let pieces = concat!(
        r#"{ } [ ] : , " \ \u null true - 1e999 0.1 "op" "ping" "op":"step" "id":1 "plan": "entries": "#,
        r#""requested": "sample": "hello""#,
    );
    let pieces: Vec<_> = pieces.split(' ').chain([" ", "\r"]).collect();
    let piece = prop_oneof![
        3 => prop::sample::select(pieces).prop_map(|piece| piece.as_bytes().to_vec()),
        1 => prop::collection::vec(any::<u8>(), 0..8),
    ];
    prop::collection::vec(piece, 0..40).prop_map(|pieces| pieces.concat())
}

proptest! {
    #[test]
    fn no_bytes_make_it_panic_or_lose_the_lines_around_them(rubble in rubble()) {
        let garbage: Vec<u8> = rubble.into_iter().filter(|&byte| byte != b'\n').collect();
        let ping = &b"{\"op\":\"ping\"}\n"[..];
        let taken = taken(&[ping, &garbage, b"\n", ping].concat(), 150);
        let lines = 2 + usize::from(!garbage.trim_ascii().is_empty());
        prop_assert_eq!(taken.len(), lines);
        prop_assert_eq!((taken[0], taken[lines - 1]), ("ping", "ping"));
    }

    #[test]
    fn replies_are_as_safe_to_read_as_requests(bytes in rubble()) {
        let mut lines = Lines::with_limit(&bytes[..], 100);
        while let Some(read) = lines.read::<RankReply>() {
            if let Err(error) = read {
                prop_assert!(error.reply().is_some());
            }
        }
    }

    #[test]
    fn any_string_comes_back_on_one_line(comm_id in any::<String>()) {
        let request = RankRequest::Init { comm_id };
        let mut pipe = Pipe::default();
        Writer::new(&mut pipe).write(&request).unwrap();
        prop_assert_eq!(pipe.bytes.iter().filter(|&&byte| byte == b'\n').count(), 1);
        prop_assert_eq!(Lines::new(&pipe.bytes[..]).read::<RankRequest>().unwrap().unwrap(), request);
    }
}
