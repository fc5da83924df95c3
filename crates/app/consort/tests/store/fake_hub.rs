//! A fake hub on loopback that serves repositories, sends slowly what it is told to, and answers searches. Tests can
//! replace single responses with wrong ones.
#![allow(clippy::unwrap_used, dead_code)] // helpers of tests, of which each program uses some

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use sha1::Sha1;
use sha2::{Digest, Sha256};

pub const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Clone, Debug)]
pub struct Request {
    pub path: String,
    pub range: Option<String>,
    pub authorization: Option<String>,
}

pub struct Reply {
    pub status: u16,
    pub headers: Vec<(&'static str, String)>,
    pub body: Vec<u8>,
    /// The value of `Content-Length`, which may differ from the length of the body.
    pub declared: Option<usize>,
    /// Sends the body repeatedly, until the client closes the connection.
    pub endless: bool,
    /// The time between two pieces of an endless body.
    pub pause: Duration,
}

impl Reply {
    pub fn new(status: u16, body: impl Into<Vec<u8>>) -> Self {
        Self { status, headers: Vec::new(), body: body.into(), declared: None, endless: false, pause: Duration::ZERO }
    }

    pub fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.headers.push((name, value.into()));
        self
    }
}

#[derive(Clone)]
pub struct HubFile {
    pub name: String,
    pub bytes: Vec<u8>,
    pub large: bool,
    /// The size that is stated of a file that comes slowly and never ends.
    pub slow: Option<usize>,
}

impl HubFile {
    pub fn large(name: &str, len: usize) -> Self {
        let seed: usize = name.bytes().map(usize::from).sum();
        let bytes = (0..len).map(|i| (i * 31 + i / 251 + seed) as u8).collect();
        Self { name: name.to_owned(), bytes, large: true, slow: None }
    }

    pub fn small(name: &str, text: &str) -> Self {
        Self { name: name.to_owned(), bytes: text.as_bytes().to_vec(), large: false, slow: None }
    }

    /// The name of the file's blob in the cache.
    pub fn digest(&self) -> String {
        let hex = |bytes: &[u8]| bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        if self.large {
            hex(&Sha256::digest(&self.bytes))
        } else {
            hex(&Sha1::new().chain_update(format!("blob {}\0", self.bytes.len())).chain_update(&self.bytes).finalize())
        }
    }

    fn listed(&self) -> String {
        let (name, len, digest) = (&self.name, self.slow.unwrap_or(self.bytes.len()), self.digest());
        let lfs = format!(r#","lfs":{{"sha256":"{digest}","size":{len},"pointerSize":134}}"#);
        let (id, lfs) = if self.large { (COMMIT.to_owned(), lfs) } else { (digest, String::new()) };
        format!(r#"{{"rfilename":"{name}","size":{len},"blobId":"{id}"{lfs}}}"#)
    }
}

type Lie = dyn Fn(&Request) -> Option<Reply> + Send + Sync;
/// Repositories and their files.
type Repos = Vec<(String, Vec<HubFile>)>;

pub struct FakeHub {
    pub endpoint: String,
    requests: Arc<Mutex<Vec<Request>>>,
}

impl FakeHub {
    pub fn honest(repo: &str, files: &[HubFile]) -> Self {
        Self::start(repo, files, |_| None)
    }

    /// `lie` may return a response that replaces the right one.
    pub fn start(
        repo: &str,
        files: &[HubFile],
        lie: impl Fn(&Request) -> Option<Reply> + Send + Sync + 'static,
    ) -> Self {
        Self::serve(vec![(repo.to_owned(), files.to_vec())], Arc::new(lie))
    }

    /// Serves several repositories.
    pub fn of(repos: impl IntoIterator<Item = (impl Into<String>, Vec<HubFile>)>) -> Self {
        let repos = repos.into_iter().map(|(repo, files)| (repo.into(), files)).collect();
        Self::serve(repos, Arc::new(|_: &Request| None))
    }

    fn serve(repos: Repos, lie: Arc<Lie>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let requests = Arc::new(Mutex::new(Vec::new()));
        let (repos, seen) = (Arc::new(repos), requests.clone());
        // The threads end with the test process, or when the client closes the connection.
        thread::spawn(move || {
            for stream in listener.incoming().flatten() {
                let (repos, seen, lie) = (repos.clone(), seen.clone(), lie.clone());
                thread::spawn(move || {
                    let Some(request) = read_request(&stream) else { return };
                    seen.lock().unwrap().push(request.clone());
                    let reply = lie(&request).unwrap_or_else(|| truth(&repos, &request));
                    let _ = send(stream, &reply);
                });
            }
        });
        Self { endpoint, requests }
    }

    pub fn requests(&self) -> Vec<Request> {
        self.requests.lock().unwrap().clone()
    }

    /// The files that were requested, with the ranges.
    pub fn fetched(&self) -> Vec<(String, Option<String>)> {
        let requests = self.requests().into_iter().filter(|request| request.path.contains("/resolve/"));
        requests.map(|r| (r.path.split_once(COMMIT).unwrap().1[1..].to_owned(), r.range)).collect()
    }
}

pub fn listing(files: &[HubFile]) -> String {
    let listed: Vec<_> = files.iter().map(HubFile::listed).collect();
    format!(r#"{{"id":"x","sha":"{COMMIT}","siblings":[{}]}}"#, listed.join(","))
}

fn truth(repos: &Repos, request: &Request) -> Reply {
    if let Some(query) = request.path.strip_prefix("/api/models?search=") {
        return Reply::new(200, results(repos, query));
    }
    let mut found = None;
    for (repo, files) in repos {
        if request.path == format!("/api/models/{repo}/revision/main?blobs=true") {
            return Reply::new(200, listing(files));
        }
        let name = request.path.strip_prefix(&format!("/{repo}/resolve/{COMMIT}/"));
        found = found.or(name.and_then(|name| files.iter().find(|file| file.name == name)));
    }
    let Some(file) = found else { return Reply::new(404, "").header("X-Error-Code", "EntryNotFound") };
    if let Some(stated) = file.slow {
        return slowly(request, stated);
    }
    let start = request.range.as_deref().map(|r| r["bytes=".len()..].trim_end_matches('-').parse::<usize>().unwrap());
    match start {
        None => Reply::new(200, file.bytes.clone()),
        Some(start) => Reply::new(206, &file.bytes[start..])
            .header("Content-Range", format!("bytes {start}-{}/{}", file.bytes.len() - 1, file.bytes.len())),
    }
}

/// At most 3.2 MB/s.
fn slowly(request: &Request, stated: usize) -> Reply {
    let slow =
        |status| Reply { endless: true, pause: Duration::from_millis(20), ..Reply::new(status, vec![7; 64_000]) };
    match &request.range {
        None => slow(200),
        Some(range) => {
            let start = range["bytes=".len()..].trim_end_matches('-');
            slow(206).header("Content-Range", format!("bytes {start}-{}/{stated}", stated - 1))
        }
    }
}

/// The repositories that have the word in their names, in the hub's format.
fn results(repos: &Repos, query: &str) -> String {
    let (word, rest) = query.split_once('&').unwrap();
    assert!(rest.contains("filter=gguf") && rest.contains("sort=downloads"), "{rest}");
    let limit = rest.split_once("limit=").unwrap().1.parse().unwrap();
    let found = repos.iter().filter(|(repo, _)| repo.to_lowercase().contains(&word.to_lowercase())).take(limit);
    let rows: Vec<_> = found
        .map(|(repo, files)| {
            format!(r#"{{"id":"{repo}","downloads":{},"likes":2,"gguf":{{"architecture":"llama"}}}}"#, files.len())
        })
        .collect();
    format!("[{}]", rows.join(","))
}

fn read_request(stream: &TcpStream) -> Option<Request> {
    let mut lines = BufReader::new(stream).lines();
    let path = lines.next()?.ok()?.split(' ').nth(1)?.to_owned();
    let mut request = Request { path, range: None, authorization: None };
    for line in lines {
        let line = line.ok()?;
        match line.split_once(": ") {
            Some((name, value)) if name.eq_ignore_ascii_case("range") => request.range = Some(value.to_owned()),
            Some((name, value)) if name.eq_ignore_ascii_case("authorization") => {
                request.authorization = Some(value.to_owned());
            }
            _ if line.is_empty() => return Some(request),
            _ => {}
        }
    }
    None
}

fn send(mut stream: TcpStream, reply: &Reply) -> std::io::Result<()> {
    write!(stream, "HTTP/1.1 {} Fake\r\nConnection: close\r\n", reply.status)?;
    for (name, value) in &reply.headers {
        write!(stream, "{name}: {value}\r\n")?;
    }
    if !reply.endless {
        write!(stream, "Content-Length: {}\r\n", reply.declared.unwrap_or(reply.body.len()))?;
    }
    write!(stream, "\r\n")?;
    loop {
        stream.write_all(&reply.body)?;
        if !reply.endless {
            return Ok(());
        }
        thread::sleep(reply.pause);
    }
}
