//! Two machines without a key on the command line: `consort cluster invite` on one, `consort join` in a terminal of the other.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails

#[path = "command_line/pty.rs"]
#[allow(dead_code)] // tests of the command line use more of it
mod pty;

use std::fs;
use std::io::BufReader;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdout, Command, Stdio};

use serde_json::{Deserializer, StreamDeserializer, Value, de::IoRead};
use tempfile::TempDir;

use pty::Pty;
use testing::bounded::{self, Log, ended};
use testing::network::{Network, address};
use testing::oracle;
use testing::serving::{consort, kill, text};
use testing::watchdog::watched;

/// The folders of a machine.
struct Machine(TempDir);

impl Machine {
    fn new() -> Self {
        Self(TempDir::new().unwrap())
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = consort(args);
        command.env_remove("CONSORT_CLUSTER_KEY");
        for (name, folder) in [("XDG_CONFIG_HOME", "config"), ("XDG_CACHE_HOME", "cache")] {
            command.env(name, self.0.path().join(folder));
        }
        command
    }

    fn key_file(&self) -> PathBuf {
        self.0.path().join("config/consort/cluster.key")
    }

    fn key(&self) -> String {
        fs::read_to_string(self.key_file()).unwrap().trim().to_owned()
    }

    /// What a command prints that has to succeed.
    fn says(&self, args: &[&str]) -> (String, String) {
        let output = bounded::output(&mut self.command(args));
        assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
        (text(&output.stdout), text(&output.stderr))
    }

    fn invite(&self, options: &[&str]) -> OpenInvitation {
        let mut command = self.command(&[&["cluster", "invite", "--json", "--name", "kitchen"], options].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap();
        let mut events = Deserializer::from_reader(BufReader::new(child.stdout.take().unwrap())).into_iter();
        let open: Value = events.next().unwrap().unwrap();
        assert_eq!((&open["event"], &open["name"]), (&"open".into(), &"kitchen".into()));
        let (code, port) = (open["code"].as_str().unwrap().to_owned(), open["port"].as_u64().unwrap());
        OpenInvitation { child, events, code, port }
    }

    /// `consort join` in a terminal.
    fn join(&self, options: &[&str]) -> Joining {
        let listen: &[&str] = if options.contains(&"--listen") { &[] } else { &["--listen", "127.0.0.1:0"] };
        let args = [&["join", "--name", "attic"], listen, options].concat();
        let mut command = self.command(&args);
        command.env_remove("RUST_LOG");
        Joining(Some(Pty::start(command, 200)))
    }
}

/// A running `consort cluster invite`.
struct OpenInvitation {
    child: Child,
    events: StreamDeserializer<'static, IoRead<BufReader<ChildStdout>>, Value>,
    code: String,
    port: u64,
}

impl OpenInvitation {
    /// Another code than the right one.
    fn wrong_code(&self) -> String {
        format!("{:06}", (self.code.parse::<u32>().unwrap() + 1) % 1_000_000)
    }

    fn next_event(&mut self) -> Value {
        self.events.next().unwrap().unwrap()
    }

    fn check_next(&mut self, expected: &[(&str, Value)]) {
        let event = self.next_event();
        expected.iter().for_each(|(name, value)| assert_eq!(&event[*name], value, "{event}"));
    }

    fn end(mut self) -> Option<i32> {
        assert!(self.events.next().is_none(), "nothing happens after the end");
        ended(&mut self.child).code()
    }
}

impl Drop for OpenInvitation {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A running `consort join`.
struct Joining(Option<Pty>);

impl Joining {
    fn read_to(&mut self, words: &str) -> String {
        self.0.as_mut().unwrap().read_to(words)
    }

    fn type_line(&mut self, line: &str) {
        self.0.as_mut().unwrap().send(format!("{line}\n").as_bytes());
    }

    fn end(mut self) -> (Option<i32>, String) {
        self.0.take().unwrap().end()
    }
}

impl Drop for Joining {
    fn drop(&mut self) {
        self.0.iter().for_each(|pty| kill("KILL", pty.id()));
    }
}

#[test]
fn a_machine_joins_with_the_code_and_keeps_the_key() {
    watched(|| {
        let (kitchen, attic) = (Machine::new(), Machine::new());
        let mut invitation = kitchen.invite(&["--listen", "127.0.0.1:0", "--no-mdns"]);
        let place = format!("127.0.0.1:{}", invitation.port);
        let mut joining = attic.join(&[&place, "--no-mdns"]);
        joining.read_to("code that");
        joining.type_line("12 34");
        joining.read_to("(a code has 6 digits)");
        joining.type_line(&invitation.wrong_code());
        joining.read_to("(the code is wrong, 2 tries are left)");
        let attempt = [("name", "attic".into()), ("address", "127.0.0.1".into()), ("tries_left", 2.into())];
        invitation.check_next(&[&[("event", "wrong_code".into())], &attempt[..]].concat());
        let (first, second) = invitation.code.split_at(3);
        joining.type_line(&format!("{first} {second}"));
        let said = joining.read_to("ready to run layers");
        assert!(said.contains("kitchen has let this machine in"), "{said}");
        invitation.check_next(&[("event", "joined".into()), ("name", "attic".into()), ("confirmed", true.into())]);
        assert_eq!(invitation.end(), Some(0));

        let key = kitchen.key();
        assert!(key.len() >= 32 && attic.key() == key);
        for machine in [&kitchen, &attic] {
            let mode = |path: &std::path::Path| path.metadata().unwrap().permissions().mode() & 0o777;
            let file = machine.key_file();
            assert_eq!((mode(&file), mode(file.parent().unwrap())), (0o600, 0o700));
            assert_eq!(machine.says(&["cluster", "key"]), (format!("{key}\n"), String::new()));
        }
        assert!(!said.contains(&key), "the key is not shown");
        // From then on it needs neither a code nor a terminal.
        drop(joining);
        let mut command = attic.command(&["join", "--listen", "127.0.0.1:0", "--no-mdns"]);
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        Log::read(child.stderr.take().unwrap()).line_with("ready to run layers");
        kill("TERM", child.id());
        assert_eq!(ended(&mut child).code(), Some(0));
    });
}

#[test]
fn another_invitation_replaces_the_key_and_the_old_one_stays_beside_it() {
    watched(|| {
        let (kitchen, attic) = (Machine::new(), Machine::new());
        // The attic has a key of its own.
        drop(attic.invite(&["--listen", "127.0.0.1:0", "--no-mdns"]));
        let own = attic.key();
        let mut invitation = kitchen.invite(&["--listen", "127.0.0.1:0", "--no-mdns"]);
        let place = format!("127.0.0.1:{}", invitation.port);
        let mut joining = attic.join(&["--invitation", &place, "--no-mdns"]);
        joining.read_to("code that");
        joining.type_line(&invitation.code);
        joining.read_to("ready to run layers");
        invitation.check_next(&[("event", "joined".into())]);
        assert_eq!(attic.key(), kitchen.key());
        assert_eq!(fs::read_to_string(attic.key_file().with_extension("key.old")).unwrap().trim(), own);
    });
}

#[test]
fn three_wrong_codes_close_the_invitation() {
    watched(|| {
        let (kitchen, attic) = (Machine::new(), Machine::new());
        let mut invitation = kitchen.invite(&["--listen", "127.0.0.1:0", "--no-mdns"]);
        let place = format!("127.0.0.1:{}", invitation.port);
        let mut joining = attic.join(&[&place, "--no-mdns"]);
        for left in ["2 tries are left", "one try is left", "it was the last try"] {
            joining.read_to("code that");
            joining.type_line(&invitation.wrong_code());
            joining.read_to(left);
        }
        assert_eq!(joining.end().0, Some(1));
        for left in [2, 1, 0] {
            invitation.check_next(&[("event", "wrong_code".into()), ("tries_left", left.into())]);
        }
        invitation.check_next(&[("event", "closed".into())]);
        assert_eq!(invitation.end(), Some(1));
        assert!(!attic.key_file().exists());
        // The right code comes too late.
        let mut late = attic.join(&[&place, "--no-mdns"]);
        late.read_to("code that");
        late.type_line("123456");
        late.read_to("no invitation is open there");
        assert_eq!(late.end().0, Some(1));
    });
}

#[test]
fn machines_of_a_network_find_the_invitation_and_each_other() {
    watched(|| {
        let Some(network) = Network::new(1) else { return };
        let (kitchen, attic) = (Machine::new(), Machine::new());
        let join = || {
            let listen = format!("{}:7420", address(1));
            let mut joining = network.within(1, || attic.join(&["--listen", &listen]));
            joining.read_to("code that kitchen (10.77.0.1:");
            joining
        };
        let mut refused = network.within(0, || kitchen.invite(&[]));
        let mut joining = join();
        for _ in 0..3 {
            joining.type_line(&refused.wrong_code());
            joining.read_to("the code is wrong");
            refused.check_next(&[("event", "wrong_code".into()), ("address", address(1).into())]);
        }
        refused.check_next(&[("event", "closed".into())]);
        assert_eq!((refused.end(), joining.end().0), (Some(1), Some(1)));
        assert!(!attic.key_file().exists());

        let mut invitation = network.within(0, || kitchen.invite(&[]));
        let mut joining = join();
        joining.type_line(&invitation.code);
        joining.read_to("ready to run layers");
        invitation.check_next(&[("event", "joined".into()), ("name", "attic".into()), ("address", address(1).into())]);
        assert_eq!(invitation.end(), Some(0));
        let model = oracle("qwen3/model-f32");
        let (table, said) = network.within(0, || kitchen.says(&["plan", model.to_str().unwrap()]));
        assert!(table.lines().any(|line| line.starts_with("attic ")), "{table}{said}");
        assert!(!format!("{table}{said}").contains(&kitchen.key()), "the key is not shown");
    });
}

#[test]
fn without_a_terminal_it_is_said_where_a_key_comes_from() {
    let machine = Machine::new();
    let refused = |args: &[&str]| {
        let output = bounded::output(&mut machine.command(args));
        (output.status.code(), text(&output.stderr))
    };
    let (code, said) = refused(&["join", "--listen", "127.0.0.1:0", "--no-mdns"]);
    assert_eq!(code, Some(2), "{said}");
    for words in ["in a terminal", "consort cluster invite", "--cluster-key-file", "CONSORT_CLUSTER_KEY"] {
        assert!(said.contains(words), "{said}");
    }
    // It makes a key once.
    let key = || text(&bounded::output(&mut machine.command(&["cluster", "key"])).stdout);
    let made = key();
    assert!(made.trim().len() == 40 && made == key(), "{made}");
    let (code, said) = refused(&["join", "--listen", "127.0.0.1:0", "--no-mdns", "--cluster-key", "passwordpassword1"]);
    assert!(code == Some(2) && said.contains("can be guessed") && said.contains("`consort cluster key`"), "{said}");
    let (code, said) = refused(&["join", "127.0.0.1", "--cluster-key", "a passphrase of the tests"]);
    assert!(code == Some(2) && said.contains("an invitation brings a key"), "{said}");
    let (code, said) =
        refused(&["join", "127.0.0.1", "--protocol", "cake", "--cluster-key", "a passphrase of the tests"]);
    assert!(code == Some(2) && said.contains("no invitations"), "{said}");
}

#[test]
fn a_key_that_other_users_may_read_is_not_used() {
    let machine = Machine::new();
    drop(machine.invite(&["--listen", "127.0.0.1:0", "--no-mdns"]));
    fs::set_permissions(machine.key_file(), fs::Permissions::from_mode(0o644)).unwrap();
    for args in [&["cluster", "key"][..], &["join", "--listen", "127.0.0.1:0", "--no-mdns"]] {
        let output = bounded::output(&mut machine.command(args));
        let said = text(&output.stderr);
        assert!(!output.status.success() && said.contains("chmod 600"), "{args:?}: {said}");
        assert!(!text(&output.stdout).contains(&machine.key()) && !said.contains(&machine.key()));
    }
}

#[test]
fn an_invitation_in_a_terminal_shows_the_code_and_ctrl_c_closes_it() {
    watched(|| {
        let machine = Machine::new();
        let command = machine.command(&["cluster", "invite", "--listen", "127.0.0.1:0", "--minutes", "1"]);
        let mut pty = Pty::start(command, 100);
        let said = pty.read_to("consort join 127.0.0.1:");
        // The code may be bold.
        let digits = |line: &str| line.replace('\u{1b}', "").replace("[1m", "").replace("[0m", "").replace(' ', "");
        let is_code = |line: &str| line.len() == 6 && line.bytes().all(|byte| byte.is_ascii_digit());
        assert!(said.lines().any(|line| is_code(&digits(line.trim()))), "{said}");
        assert!(said.contains("For the next minute, one machine can join with the code"), "{said}");
        pty.read_to("waiting for a machine, 0 min 5");
        kill("INT", pty.id());
        let (status, rest) = pty.end();
        assert!(rest.contains("the invitation is closed: it was closed here"), "{rest}");
        assert_eq!(status, Some(130));
    });
}
