// The same work on VictoriaMetrics' persistentqueue: one goroutine writes blocks, then (or meanwhile) they are read.
package main

import (
	"crypto/rand"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"strconv"
	"time"

	"github.com/VictoriaMetrics/VictoriaMetrics/lib/persistentqueue"
)

func main() {
	// Its memory package insists on parsed flags; ours are positional.
	if err := flag.CommandLine.Parse(nil); err != nil {
		panic(err)
	}
	size, _ := strconv.Atoi(os.Args[2])
	count, _ := strconv.Atoi(os.Args[3])
	path := os.Args[1]
	// No blocks in memory: this measures the queue on disk, as ours writes every record.
	queue := persistentqueue.MustOpenFastQueue(path, "bench", 0, 0, false)
	block := make([]byte, size)
	if _, err := rand.Read(block); err != nil {
		panic(err)
	}
	start := time.Now()
	done := make(chan int)
	go func() {
		var buffer []byte
		bytes := 0
		for i := 0; i < count; i++ {
			var ok bool
			buffer, ok = queue.MustReadBlock(buffer[:0])
			if !ok {
				break
			}
			bytes += len(buffer)
		}
		done <- bytes
	}()
	for i := 0; i < count; i++ {
		if !queue.TryWriteBlock(block) {
			panic("refused")
		}
	}
	bytes := <-done
	elapsed := time.Since(start).Seconds()
	queue.UnblockAllReaders()
	queue.MustClose()
	out, _ := json.Marshal(map[string]float64{"blocks_per_second": float64(count) / elapsed, "bytes": float64(bytes)})
	fmt.Println(string(out))
}
