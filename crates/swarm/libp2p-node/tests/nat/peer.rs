//! `Peer`: a process of this test that runs a node on a machine. The test writes commands to it and reads its answers.

use std::env;
use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use libp2p_node::{Identity, IncomingStream, Node, NodeHandle, NodeOptions, PeerStream, parse_peer, peer_text};
use tokio::io::{AsyncBufReadExt, AsyncReadExt, AsyncWriteExt};

use crate::network::Machine;

/// Set in processes that run a node: what it is started with.
const OPTIONS: &str = "CONSORT_NAT_PEER";
const ECHO: &str = "/test/echo/1";
/// More than fits into one packet.
const BYTES: usize = 300_000;
/// Far longer than anything here takes. Peers that reach each other through a relay try a few times to connect directly.
const HANGS: Duration = Duration::from_secs(240);
/// What a node logs when it has tried in vain to connect directly.
pub const STAYS_RELAYED: &str = "a peer stays relayed";

pub struct Peer {
    child: Child,
    input: ChildStdin,
    output: Lines,
    log: Lines,
    pub id: String,
}

/// Lines of a process, as they come.
#[derive(Clone, Default)]
struct Lines {
    lines: Arc<(Mutex<Vec<String>>, Condvar)>,
}

impl Peer {
    /// `options` are `listen ADDRESS`, `bootstrap ADDRESS` and `relay`, with spaces between them.
    pub fn start(machine: &Machine, options: &str) -> Self {
        let spawn = || {
            let mut command = Command::new(env::current_exe().unwrap());
            command.env(OPTIONS, options).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let mut child = machine.within(spawn);
        let output = Lines::read(child.stdout.take().unwrap());
        let log = Lines::read(child.stderr.take().unwrap());
        let input = child.stdin.take().unwrap();
        let id = output.wait(0, |line| line.strip_prefix("id ").map(str::to_owned));
        Self { child, input, output, log, id }
    }

    /// Sends a command and returns the answer.
    pub fn ask(&mut self, command: &str) -> String {
        let answered = self.output.len();
        writeln!(self.input, "{command}").unwrap();
        self.output.wait(answered, |line| Some(line.to_owned()))
    }

    /// Asks until the answer is this one.
    pub fn wait_for(&mut self, command: &str, answer: &str) {
        let start = Instant::now();
        while self.ask(command) != answer {
            assert!(start.elapsed() < HANGS, "{command}: not {answer}");
            thread::sleep(Duration::from_millis(100));
        }
    }

    pub fn wait_for_log(&self, words: &str) {
        self.log.wait(0, |line| line.contains(words).then_some(()));
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let log = self.log.lines.0.lock().unwrap();
            eprintln!("log of {}:\n{}\n", self.id, log.join("\n"));
        }
    }
}

impl Lines {
    fn read(from: impl std::io::Read + Send + 'static) -> Self {
        let lines = Self::default();
        let shared = lines.clone();
        thread::spawn(move || {
            for line in BufReader::new(from).lines().map_while(Result::ok) {
                shared.lines.0.lock().unwrap().push(line);
                shared.lines.1.notify_all();
            }
        });
        lines
    }

    fn len(&self) -> usize {
        self.lines.0.lock().unwrap().len()
    }

    /// Waits for a line, from this one on.
    fn wait<T>(&self, from: usize, mut find: impl FnMut(&str) -> Option<T>) -> T {
        let mut lines = self.lines.0.lock().unwrap();
        loop {
            if let Some(found) = lines.iter().skip(from).find_map(|line| find(line)) {
                return found;
            }
            let (more, time) = self.lines.1.wait_timeout(lines, HANGS).unwrap();
            assert!(!time.timed_out(), "no such line: {more:?}");
            lines = more;
        }
    }
}

/// Runs a node, if this process was started to do so.
pub fn run_if_asked() -> bool {
    let Ok(options) = env::var(OPTIONS) else { return false };
    let filter = "libp2p_node=debug,libp2p_dcutr=debug,libp2p_autonat=debug,libp2p_relay=debug";
    tracing_subscriber::fmt().with_env_filter(filter).with_ansi(false).with_writer(std::io::stderr).init();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
    runtime.block_on(run(&options));
    true
}

async fn run(text: &str) {
    let mut options = NodeOptions::new(Identity::ephemeral());
    options.accepts = vec![ECHO];
    let mut words = text.split_whitespace();
    while let Some(word) = words.next() {
        match word {
            "listen" => options.listen.push(words.next().unwrap().parse().unwrap()),
            "bootstrap" => options.bootstrap.push(words.next().unwrap().parse().unwrap()),
            "relay" => options.relay_server = true,
            _ => panic!("{word}"),
        }
    }
    let (node, mut incoming) = Node::start(options).unwrap();
    println!("id {}", peer_text(&node.peer()));
    tokio::spawn(async move {
        while let Some(stream) = incoming.next().await {
            tokio::spawn(echo(stream));
        }
    });
    let mut commands = tokio::io::BufReader::new(tokio::io::stdin()).lines();
    // The end of the input is the end of the test.
    while let Ok(Some(command)) = commands.next_line().await {
        println!("{}", answer(&node, &command).await);
    }
}

async fn answer(node: &NodeHandle, command: &str) -> String {
    let words: Vec<_> = command.split(' ').collect();
    match words[..] {
        ["reachability"] => format!("{:?}", node.reachability()),
        ["addresses"] => format!("{:?}", node.addresses()),
        ["path", peer] => {
            let peer = parse_peer(peer).unwrap();
            let connected = node.peers().into_iter().find(|connected| connected.peer == peer);
            connected.map_or("none".to_owned(), |peer| path(peer.is_relayed).to_owned())
        }
        ["transport", peer] => {
            let peer = parse_peer(peer).unwrap();
            let connected = node.peers().into_iter().find(|connected| connected.peer == peer);
            connected.map_or("none".to_owned(), |peer| peer.address.to_string())
        }
        ["echo", peer] => match node.open(&parse_peer(peer).unwrap(), &[], ECHO).await {
            Ok(stream) => {
                let path = path(stream.is_relayed());
                exchange(stream).await.map_or_else(|error| error.to_string(), |()| path.to_owned())
            }
            Err(error) => error.to_string(),
        },
        _ => panic!("{command}"),
    }
}

fn path(is_relayed: bool) -> &'static str {
    if is_relayed { "relayed" } else { "direct" }
}

async fn echo(incoming: IncomingStream) {
    let (mut reader, mut writer) = tokio::io::split(incoming.stream);
    let _ = tokio::io::copy(&mut reader, &mut writer).await;
    let _ = writer.shutdown().await;
}

/// Sends bytes and gets the same ones back.
async fn exchange(stream: PeerStream) -> std::io::Result<()> {
    let sent: Vec<u8> = (0..BYTES).map(|index| (index % 251) as u8).collect();
    let (mut reader, mut writer) = tokio::io::split(stream);
    let send = async {
        writer.write_all(&sent).await?;
        writer.shutdown().await
    };
    let mut received = Vec::new();
    let (sending, receiving) = tokio::join!(send, reader.read_to_end(&mut received));
    sending?;
    receiving?;
    assert!(received == sent, "{} of {} bytes", received.len(), sent.len());
    Ok(())
}
