//! `Prefix`: the key under which an executor finds pages of a prompt that were computed before.
//!
//! The hash of a page covers its tokens and the hash of the page before it, so equal hashes mean equal tokens from the first
//! one on: the hash is cryptographic, has 256 bits, and is compared whole. The first page is salted with the tenant. Each
//! process that holds a KV cache finds its own pages by these hashes.

use types::TokenId;

use crate::request::TenantId;

/// Identifies a whole page of a prompt and everything before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PageHash(pub [u8; 32]);

/// The beginning of a session.
#[derive(Clone, Copy, Debug)]
pub struct Prefix<'a> {
    /// The prompt: penalties need the tokens of pages that are found.
    pub tokens: &'a [TokenId],
    /// One for each whole page of the prompt. Pages are found by these hashes, and published under them when computed.
    pub pages: &'a [PageHash],
    /// Tokens that may come from the cache; the others have to be run because their output is requested.
    pub reuse_max: usize,
}

impl Prefix<'_> {
    /// Nothing is looked up, and nothing is published.
    pub const NONE: Prefix<'static> = Prefix { tokens: &[], pages: &[], reuse_max: 0 };
}

/// The hashes of the whole pages of a prompt.
pub fn page_hashes(tenant: TenantId, prompt: &[TokenId], page_tokens: usize) -> Vec<PageHash> {
    let mut hasher = blake3::Hasher::new_derive_key("consort: the name of a page of a prompt");
    let hash = |hasher: &mut blake3::Hasher, before: &[u8], page: &[TokenId]| {
        hasher.reset();
        hasher.update(before);
        for token in page {
            hasher.update(&token.0.to_le_bytes());
        }
        PageHash(*hasher.finalize().as_bytes())
    };
    let salt = hash(&mut hasher, &tenant.0.to_le_bytes(), &[]);
    let pages = prompt.chunks_exact(page_tokens).scan(salt, |before, page| {
        *before = hash(&mut hasher, &before.0, page);
        Some(*before)
    });
    pages.collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(ids: impl IntoIterator<Item = u32>) -> Vec<TokenId> {
        ids.into_iter().map(TokenId).collect()
    }

    #[test]
    fn a_hash_depends_on_every_token_before_and_on_the_tenant() {
        let prompt = tokens(0..70);
        let hashes = page_hashes(TenantId(1), &prompt, 32);
        assert_eq!(hashes.len(), 2, "only whole pages are hashed");
        assert_eq!(hashes, page_hashes(TenantId(1), &prompt[..64], 32));
        let other = page_hashes(TenantId(2), &prompt, 32);
        assert!(hashes.iter().all(|hash| !other.contains(hash)));
        for changed in [0, 31, 32, 63] {
            let mut prompt = prompt.clone();
            prompt[changed].0 += 1000;
            let found = page_hashes(TenantId(1), &prompt, 32);
            assert_eq!([found[0] == hashes[0], found[1] == hashes[1]], [changed > 31, false], "token {changed}");
        }
    }

    #[test]
    fn the_same_tokens_on_another_page_have_another_hash() {
        let hashes = page_hashes(TenantId(1), &tokens((0..32).chain(0..32)), 32);
        assert_ne!(hashes[0], hashes[1]);
    }
}
