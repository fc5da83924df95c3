//! `PagePool`: which pages of the KV cache are free, how many sessions refer to each of the others, and which of them the
//! prefix cache can find by hash.
//!
//! A page is *used* (a session refers to it), *cached* (no session refers to it, but its hash is known, and it is found
//! until it is allocated), or *empty*. A session releases its pages from the last to the first, and a session that
//! refers to a page refers to all pages before it. So in the LRU list a page always comes after the pages that continue
//! it, and evicting the oldest page evicts a leaf of the tree of prefixes: the pages that are left can still be
//! reached.

use std::collections::HashMap;

use crate::prefix::PageHash;

/// Page ids below a fixed count.
#[derive(Debug)]
pub struct PagePool {
    /// A stack: the page released last is allocated first, while its memory may still be in a CPU cache.
    empty: Vec<u32>,
    references: Vec<u32>,
    hashes: Vec<Option<PageHash>>,
    by_hash: HashMap<PageHash, u32>,
    /// Cached pages that no session refers to.
    unused: LruList,
}

impl PagePool {
    pub fn new(count: usize) -> Self {
        let ids = u32::try_from(count).ok().filter(|&count| count < NONE).expect("page ids are 32 bits");
        Self {
            empty: (0..ids).rev().collect(),
            references: vec![0; count],
            hashes: vec![None; count],
            by_hash: HashMap::with_capacity(count),
            unused: LruList::new(count),
        }
    }

    pub fn total(&self) -> usize {
        self.references.len()
    }

    /// Pages that can be allocated: empty or cached.
    pub fn free(&self) -> usize {
        self.empty.len() + self.unused.len
    }

    /// Pages that no session refers to and that can be found by hash.
    pub fn cached(&self) -> usize {
        self.unused.len
    }

    /// Allocates a page, with one reference: an empty one, else the cached one that was released longest ago.
    pub fn allocate(&mut self) -> Option<u32> {
        let page = match self.empty.pop() {
            Some(page) => page,
            None => {
                let page = self.unused.oldest()?;
                self.unused.remove(page);
                let hash = self.hashes[page as usize].take().expect("a cached page has a hash");
                self.by_hash.remove(&hash);
                page
            }
        };
        self.references[page as usize] = 1;
        Some(page)
    }

    /// Adds a reference to a page that is used or cached.
    pub fn retain(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        if *references == 0 {
            assert!(self.hashes[page as usize].is_some(), "page {page} is empty");
            self.unused.remove(page);
        }
        *references += 1;
    }

    /// Removes a reference. Without references a page is cached if it has a hash, else empty.
    pub fn release(&mut self, page: u32) {
        let references = &mut self.references[page as usize];
        *references = references.checked_sub(1).expect("a page is released as often as it was allocated or retained");
        if *references == 0 {
            match self.hashes[page as usize] {
                Some(_) => self.unused.push(page),
                None => self.empty.push(page),
            }
        }
    }

    /// Publishes a used page, which is never written to again, in the prefix cache. If the cache has a page with this
    /// hash, the caller's reference moves to that one. Returns the page in the cache.
    pub fn publish(&mut self, page: u32, hash: PageHash) -> u32 {
        assert!(self.references[page as usize] > 0, "page {page} is not used");
        match self.by_hash.get(&hash) {
            Some(&same) if same == page => page,
            Some(&same) => {
                self.retain(same);
                self.release(page);
                same
            }
            None => {
                assert!(self.hashes[page as usize].is_none(), "page {page} has another hash");
                self.hashes[page as usize] = Some(hash);
                self.by_hash.insert(hash, page);
                page
            }
        }
    }

    /// The page with this hash, used or cached.
    pub fn find(&self, hash: &PageHash) -> Option<u32> {
        self.by_hash.get(hash).copied()
    }

    /// Removes all pages from the prefix cache: their contents may be wrong.
    pub fn clear_prefix_cache(&mut self) {
        self.by_hash.clear();
        self.hashes.fill(None);
        while let Some(page) = self.unused.oldest() {
            self.unused.remove(page);
            self.empty.push(page);
        }
    }

    pub fn references(&self, page: u32) -> u32 {
        self.references[page as usize]
    }

    /// Whether a page was published in the prefix cache.
    pub fn is_published(&self, page: u32) -> bool {
        self.hashes[page as usize].is_some()
    }
}

/// No page.
const NONE: u32 = u32::MAX;

/// Pages in the order of their release: a doubly linked list whose links are in an array, so that no call allocates.
#[derive(Debug)]
struct LruList {
    /// The previous and the next page of each page in the list.
    links: Vec<[u32; 2]>,
    /// The oldest and the newest.
    ends: [u32; 2],
    len: usize,
}

impl LruList {
    fn new(pages: usize) -> Self {
        Self { links: vec![[NONE; 2]; pages], ends: [NONE; 2], len: 0 }
    }

    fn oldest(&self) -> Option<u32> {
        Some(self.ends[0]).filter(|&page| page != NONE)
    }

    fn push(&mut self, page: u32) {
        let newest = self.ends[1];
        self.links[page as usize] = [newest, NONE];
        match newest {
            NONE => self.ends[0] = page,
            before => self.links[before as usize][1] = page,
        }
        self.ends[1] = page;
        self.len += 1;
    }

    fn remove(&mut self, page: u32) {
        let [before, after] = self.links[page as usize];
        match before {
            NONE => self.ends[0] = after,
            page => self.links[page as usize][1] = after,
        }
        match after {
            NONE => self.ends[1] = before,
            page => self.links[page as usize][0] = before,
        }
        self.len -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(id: u8) -> PageHash {
        PageHash([id; 32])
    }

    #[test]
    fn a_shared_page_is_free_only_after_its_last_release() {
        let mut pool = PagePool::new(2);
        let page = pool.allocate().unwrap();
        pool.retain(page);
        pool.release(page);
        assert_eq!((pool.free(), pool.references(page)), (1, 1));
        pool.release(page);
        assert_eq!(pool.free(), 2);
    }

    #[test]
    fn an_exhausted_pool_allocates_nothing() {
        let mut pool = PagePool::new(1);
        assert!(pool.allocate().is_some());
        assert_eq!(pool.allocate(), None);
        assert_eq!(PagePool::new(0).allocate(), None);
    }

    #[test]
    #[should_panic(expected = "released as often")]
    fn releasing_a_free_page_is_our_mistake() {
        let mut pool = PagePool::new(1);
        let page = pool.allocate().unwrap();
        pool.release(page);
        pool.release(page);
    }

    #[test]
    fn a_published_page_is_found_until_it_is_allocated_and_the_oldest_goes_first() {
        let mut pool = PagePool::new(3);
        let [a, b, c] = [(); 3].map(|()| pool.allocate().unwrap());
        for (page, id) in [(a, 1), (b, 2), (c, 3)] {
            assert_eq!(pool.publish(page, hash(id)), page);
        }
        for page in [b, a, c] {
            pool.release(page);
        }
        assert_eq!((pool.free(), pool.cached()), (3, 3));
        pool.retain(b); // used again, and released last
        assert_eq!((pool.free(), pool.cached()), (2, 2));
        pool.release(b);
        assert_eq!(pool.allocate(), Some(a));
        assert_eq!([1, 2, 3].map(|id| pool.find(&hash(id))), [None, Some(b), Some(c)]);
        assert_eq!([pool.allocate(), pool.allocate(), pool.allocate()], [Some(c), Some(b), None]);
        assert_eq!(pool.find(&hash(2)), None);
    }

    #[test]
    fn of_two_pages_with_one_hash_the_first_is_kept() {
        let mut pool = PagePool::new(2);
        let [a, b] = [(); 2].map(|()| pool.allocate().unwrap());
        pool.publish(a, hash(1));
        assert_eq!(pool.publish(a, hash(1)), a);
        assert_eq!(pool.publish(b, hash(1)), a);
        assert_eq!((pool.references(a), pool.references(b), pool.free()), (2, 0, 1));
    }

    #[test]
    fn pages_of_a_cleared_cache_are_not_found_and_become_empty() {
        let mut pool = PagePool::new(2);
        let [a, b] = [(); 2].map(|()| pool.allocate().unwrap());
        pool.publish(a, hash(1));
        pool.publish(b, hash(2));
        pool.release(a);
        pool.clear_prefix_cache();
        assert_eq!((pool.find(&hash(1)), pool.find(&hash(2))), (None, None));
        assert_eq!((pool.free(), pool.cached()), (1, 0));
        pool.release(b);
        assert_eq!((pool.free(), pool.cached()), (2, 0));
    }
}
